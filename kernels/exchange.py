"""The kernels of the `nvlink` transport: rows between A and F ranks by writes into peers' memory.

A *channel* is one lane's or path's set of buffers and flags (`sglang_afd.dispatch.channel`).  One
exchange runs four kernels, in this order, each on its rank's own stream:

==============  ====  =========================================================================
`send_rows`     A     writes rows, local expert ids and weights into all F ranks, then its flag
`flags.wait`    F     until the A ranks' flags show this exchange
`return_rows`   F     reduces each row's expert outputs, writes one row back, then its flag on A
`flags.wait`    A     until the F ranks' flags show this exchange
`sum_replies`   A     adds what the F ranks returned, in rank order
==============  ====  =========================================================================

Flags and waits are in `sglang_afd.kernels.flags`.  Peers are given as int64 tensors of addresses in
this process's address space.

Kernels that are given `sglang_afd.kernels.stamps` leave moments there, if those are armed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_afd.kernels.flags import AT_ONCE, is_last, raise_flags, store_exchange_number
from sglang_afd.kernels.stamps import (
    RETURN,
    RETURNED,
    SEND,
    SENT,
    SUMMED,
    constants_of,
    stamp,
    stamp_first,
    stamp_latest,
)

MAX_BLOCK = 2048
"""Elements of a row that one block moves at a time."""
WARPS = 8
"""Of a block that moves rows."""

# Triton compiles a kernel anew for counts of 1 or multiples of 16, and for addresses of other
# alignment: with counts that change from exchange to exchange, while lanes wait.
_COUNTS = ["rows", "cap", "first", "count", "rows_each", "sources"]
_ROUTING = ["expert_ids", "weights"]
_compiled_once = triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_ROUTING)

_SEND, _SENT, _SUMMED = tl.constexpr(SEND), tl.constexpr(SENT), tl.constexpr(SUMMED)
_RETURN, _RETURNED = tl.constexpr(RETURN), tl.constexpr(RETURNED)


@triton.jit
def put_row(
    hidden,
    row,
    local,
    weight,
    part,
    row_addresses,
    id_addresses,
    weight_addresses,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    PER_RANK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr,
):
    """Write a row's local ids into a part of a peer's, and the row if one of them is the peer's."""
    places = tl.arange(0, K_BLOCK)
    columns = tl.arange(0, H_BLOCK)
    local = tl.where((local >= 0) & (local < PER_RANK), local, -1)
    id_row = tl.load(id_addresses + part).to(tl.pointer_type(tl.int32)) + row * TOP_K
    tl.store(id_row + places, local, mask=places < TOP_K)
    if tl.max(local, axis=0) >= 0:
        weight_row = tl.load(weight_addresses + part).to(tl.pointer_type(tl.float32))
        tl.store(weight_row + row * TOP_K + places, weight, mask=places < TOP_K)
        base = tl.load(row_addresses + part).to(tl.pointer_type(hidden.dtype.element_ty))
        there = tl.multiple_of(base, 16) + tl.cast(row, tl.int64) * HIDDEN
        here = hidden + tl.cast(row, tl.int64) * HIDDEN
        for start in tl.static_range(0, HIDDEN, H_BLOCK):
            inside = start + columns < HIDDEN
            tl.store(
                there + start + columns,
                tl.load(here + start + columns, mask=inside),
                mask=inside,
            )


@_compiled_once
def _send_rows(
    hidden,
    expert_ids,
    weights,
    rows,
    cap,
    row_addresses,
    id_addresses,
    weight_addresses,
    flag_addresses,
    exchange,
    ticket,
    stamps,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    PER_RANK: tl.constexpr,
    FFN_RANKS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr,
    STAMPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if STAMPS:
        stamp_first(stamps, tl.load(exchange) + 1, _SEND, STAMPS, INTERPRETED)
    places = tl.arange(0, K_BLOCK)
    for row in range(tl.program_id(0), cap, tl.num_programs(0)):
        held = (places < TOP_K) & (row < rows)
        ids = tl.load(expert_ids + row * TOP_K + places, mask=held, other=-1).to(tl.int32)
        weight = tl.load(weights + row * TOP_K + places, mask=held, other=0.0)
        for rank in tl.static_range(FFN_RANKS):
            put_row(
                hidden,
                row,
                ids - rank * PER_RANK,
                weight,
                rank,
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
        number = tl.load(exchange) + 1
        tl.store(exchange, number)
        for rank in tl.static_range(FFN_RANKS):
            flag = tl.load(flag_addresses + rank).to(tl.pointer_type(tl.int64))
            store_exchange_number(flag, number)
        if STAMPS:
            stamp(stamps, number, _SENT, STAMPS, INTERPRETED)


@_compiled_once
def _return_rows(
    outputs,
    expert_ids,
    weights,
    first,
    rows_each,
    rows,
    row_addresses,
    flag_addresses,
    exchanges,
    sources,
    ticket,
    cap,
    stamps,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PEERS: tl.constexpr,
    STAMPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if STAMPS:
        stamp_first(stamps, tl.load(exchanges + first), _RETURN, STAMPS, INTERPRETED)
    places = tl.arange(0, K_BLOCK)
    columns = tl.arange(0, H_BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        source = first + index // rows_each
        row = index % rows_each
        routed = (source * cap + row) * TOP_K
        ids = tl.load(expert_ids + routed + places, mask=places < TOP_K, other=-1)
        if tl.max(ids, axis=0) >= 0:
            base = tl.load(row_addresses + source).to(tl.pointer_type(outputs.dtype.element_ty))
            there = tl.multiple_of(base, 16) + tl.cast(row, tl.int64) * HIDDEN
            here = outputs + tl.cast(index, tl.int64) * TOP_K * HIDDEN
            for start in tl.static_range(0, HIDDEN, H_BLOCK):
                inside = start + columns < HIDDEN
                total = tl.zeros([H_BLOCK], dtype=tl.float32)
                for place in tl.static_range(TOP_K):
                    present = tl.load(expert_ids + routed + place) >= 0
                    weight = tl.load(weights + routed + place, mask=present, other=0.0)
                    output = tl.load(
                        here + place * HIDDEN + start + columns, mask=inside & present, other=0.0
                    )
                    total += output.to(tl.float32) * weight
                tl.store(there + start + columns, total.to(outputs.dtype.element_ty), mask=inside)
    if is_last(ticket):
        raise_flags(flag_addresses, first, sources, exchanges, 1, AT_ONCE, PEERS)
        if STAMPS:
            stamp(stamps, tl.load(exchanges + first), _RETURNED, STAMPS, INTERPRETED)


@_compiled_once
def _sum_replies(
    replies,
    expert_ids,
    total_rows,
    cap,
    exchange,
    stamps,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    PER_RANK: tl.constexpr,
    FFN_RANKS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr,
    STAMPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0)
    places = tl.arange(0, K_BLOCK)
    columns = tl.program_id(1) * H_BLOCK + tl.arange(0, H_BLOCK)
    ids = tl.load(expert_ids + row * TOP_K + places, mask=places < TOP_K, other=-1).to(tl.int32)
    total = tl.zeros([H_BLOCK], dtype=tl.float32)
    for rank in tl.static_range(FFN_RANKS):
        local = ids - rank * PER_RANK
        sent = tl.max(((ids >= 0) & (local >= 0) & (local < PER_RANK)).to(tl.int32), axis=0) > 0
        reply = replies + (rank * cap + row).to(tl.int64) * HIDDEN
        total += tl.load(reply + columns, mask=sent & (columns < HIDDEN), other=0.0).to(tl.float32)
    tl.store(
        total_rows + tl.cast(row, tl.int64) * HIDDEN + columns,
        total.to(total_rows.dtype.element_ty),
        mask=columns < HIDDEN,
    )
    if STAMPS:
        stamp_latest(stamps, tl.load(exchange), _SUMMED, STAMPS, INTERPRETED)


class Peers(NamedTuple):
    """Where a rank writes into each of its peers: int64 tensors of one address a peer.

    ids and weights are None on F ranks, which return rows alone.
    """

    rows: torch.Tensor
    flags: torch.Tensor
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None


def send_rows(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    to: Peers,
    exchange: torch.Tensor,
    ticket: torch.Tensor,
    slots: int,
    per_rank: int,
    blocks: int,
    stamps: torch.Tensor | None = None,
) -> None:
    """Write each row once into every F rank that owns one of its experts, then raise the flags.

    Args:
        hidden: [n, H], contiguous; expert_ids: [n, K] global, contiguous; weights: [n, K] float32.
        exchange: [1] int64, this channel's count of exchanges; goes up by one.
        ticket: [1] int32, zero between launches; for this kernel alone.
        slots: rows whose ids are written, n at least; those past n get -1.
        per_rank: experts of an F rank.
        blocks: thread blocks at most.
    """
    top_k, size = expert_ids.shape[1], hidden.shape[1]
    assert to.ids is not None and to.weights is not None
    _send_rows[(max(1, min(blocks, slots)),)](
        hidden,
        expert_ids,
        weights,
        hidden.shape[0],
        slots,
        to.rows,
        to.ids,
        to.weights,
        to.flags,
        exchange,
        ticket,
        stamps if stamps is not None else exchange,
        HIDDEN=size,
        TOP_K=top_k,
        PER_RANK=per_rank,
        FFN_RANKS=to.rows.shape[0],
        K_BLOCK=triton.next_power_of_2(top_k),
        H_BLOCK=min(MAX_BLOCK, triton.next_power_of_2(size)),
        **constants_of(stamps),
        num_warps=WARPS,
    )


def return_rows(
    outputs: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    to: Peers,
    exchanges: torch.Tensor,
    ticket: torch.Tensor,
    first: int,
    count: int,
    rows_each: int,
    cap: int,
    blocks: int,
    stamps: torch.Tensor | None = None,
) -> None:
    """Reduce the expert outputs of sources `first` .. `first + count - 1` and write the rows back.

    Args:
        outputs: [count * rows_each, K, H], contiguous, source by source.
        expert_ids, weights: [sources * cap, K] as received, local ids.
        exchanges: int64, one a source, as `wait` left them.
        rows_each: rows of a source that `outputs` holds; cap: rows of a source in the buffers.
    """
    rows, top_k, size = outputs.shape
    _return_rows[(max(1, min(blocks, rows)),)](
        outputs,
        expert_ids,
        weights,
        first,
        rows_each,
        rows,
        to.rows,
        to.flags,
        exchanges,
        count,
        ticket,
        cap,
        stamps if stamps is not None else exchanges,
        HIDDEN=size,
        TOP_K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        H_BLOCK=min(MAX_BLOCK, triton.next_power_of_2(size)),
        **constants_of(stamps),
        AT_ONCE=AT_ONCE,
        PEERS=triton.next_power_of_2(to.flags.shape[0]),
        num_warps=WARPS,
        enable_fp_fusion=False,  # products are rounded before they are added, as in the reference
    )


def sum_replies(
    replies: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    cap: int,
    per_rank: int,
    out: torch.Tensor,
    exchange: torch.Tensor,
    stamps: torch.Tensor | None = None,
) -> None:
    """Add up what the F ranks returned: see `exchange_reference.sum_replies`.

    Args:
        replies: [F * cap, H]; expert_ids: [n, K] global; out: [n, H].
        exchange: as `send_rows` left it.
    """
    rows, size = out.shape
    if not rows:
        return
    top_k = expert_ids.shape[1]
    block = min(MAX_BLOCK, triton.next_power_of_2(size))
    _sum_replies[(rows, triton.cdiv(size, block))](
        replies,
        expert_ids,
        out,
        cap,
        exchange,
        stamps if stamps is not None else exchange,
        HIDDEN=size,
        TOP_K=top_k,
        PER_RANK=per_rank,
        FFN_RANKS=replies.shape[0] // cap,
        K_BLOCK=triton.next_power_of_2(top_k),
        H_BLOCK=block,
        **constants_of(stamps),
    )
