"""The kernel of emulated ranks: a rank sends the rows of the A ranks that it stands for.

It runs after `exchange.send_rows` of the same exchange, on the same stream, and writes and flags as
that kernel does, for all sources at once.  `exchange_reference.drawn_ids` says which ids go out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_afd.kernels.exchange import MAX_BLOCK, WARPS, Peers, put_row
from sglang_afd.kernels.flags import AT_ONCE, is_last, raise_flags

# as in `sglang_afd.kernels.exchange`: compiled once, whatever the counts
_compiled_once = triton.jit(
    do_not_specialize=["rows", "cap", "sources"], do_not_specialize_on_alignment=["expert_ids"]
)


@_compiled_once
def _send_drawn(
    hidden,
    expert_ids,
    drawn,
    rows,
    cap,
    sources,
    row_addresses,
    id_addresses,
    weight_addresses,
    flag_addresses,
    exchange,
    ticket,
    DRAWS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    PER_RANK: tl.constexpr,
    FFN_RANKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PEERS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr,
):
    places = tl.arange(0, K_BLOCK)
    number = tl.load(exchange)
    first = (number % DRAWS) * sources * cap
    for index in range(tl.program_id(0), sources * cap, tl.num_programs(0)):
        source = index // cap
        row = index % cap
        here = (places < TOP_K) & (row < rows)
        real = tl.load(expert_ids + row * TOP_K + places, mask=here, other=-1)
        held = here & (tl.max(real, axis=0) >= 0)
        ids = tl.load(drawn + (first + index) * TOP_K + places, mask=held, other=-1)
        weight = tl.full([K_BLOCK], 1.0 / TOP_K, tl.float32)
        for rank in tl.static_range(FFN_RANKS):
            put_row(
                hidden,
                row,
                ids - rank * PER_RANK,
                weight,
                rank * sources + source,
                row_addresses,
                id_addresses,
                weight_addresses,
                HIDDEN,
                TOP_K,
                PER_RANK,
                K_BLOCK,
                H_BLOCK,
            )
    if is_last(ticket):
        raise_flags(flag_addresses, 0, FFN_RANKS * sources, exchange, 0, AT_ONCE, PEERS)


def send_drawn(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    drawn: torch.Tensor,
    *,
    to: Peers,
    exchange: torch.Tensor,
    ticket: torch.Tensor,
    per_rank: int,
    blocks: int,
) -> None:
    """Write the rows of S emulated sources into the F ranks that own their experts; raise flags.

    Each source has a row where the real rank has one that any expert wants, with that row's hidden
    state; so how many there are is read on the device.

    Args:
        hidden: [n, H], contiguous; expert_ids: [n, K] int32 global, contiguous: the real rank's.
        drawn: [D, S, cap, K] int32 global ids; exchange e takes the ones at e modulo D.
        to: addresses of the parts of S sources on each F rank, F rank by F rank.
        exchange: [1] int64, this channel's count of exchanges, as `send_rows` has left it.
        ticket: [1] int32, zero between launches; for this kernel alone.
        per_rank: experts of an F rank.
        blocks: thread blocks at most.
    """
    draws, sources, cap, top_k = drawn.shape
    size = hidden.shape[1]
    assert to.ids is not None and to.weights is not None
    _send_drawn[(max(1, min(blocks, sources * cap)),)](
        hidden,
        expert_ids,
        drawn,
        hidden.shape[0],
        cap,
        sources,
        to.rows,
        to.ids,
        to.weights,
        to.flags,
        exchange,
        ticket,
        DRAWS=draws,
        HIDDEN=size,
        TOP_K=top_k,
        PER_RANK=per_rank,
        FFN_RANKS=to.rows.shape[0] // sources,
        AT_ONCE=AT_ONCE,
        PEERS=triton.next_power_of_2(to.rows.shape[0]),
        K_BLOCK=triton.next_power_of_2(top_k),
        H_BLOCK=min(MAX_BLOCK, triton.next_power_of_2(size)),
        num_warps=WARPS,
    )
