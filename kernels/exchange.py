"""The kernels of the `nvlink` transport: rows between A and F ranks by writes into peers' memory.

A *channel* is one lane's or path's set of buffers and flags (`sglang_afd.dispatch.channel`).  One
exchange runs four kernels, in this order, each on its rank's own stream:

==============  ====  =========================================================================
`send_rows`     A     writes rows, local expert ids and weights into all F ranks, then its flag
`wait`          F     until the A ranks' flags show this exchange
`return_rows`   F     reduces each row's expert outputs, writes one row back, then its flag on A
`wait`          A     until the F ranks' flags show this exchange
`sum_replies`   A     adds what the F ranks returned, in rank order
==============  ====  =========================================================================

A flag holds the number of the exchange, counted on the device, so that a captured graph can be
replayed.  A wait is one block of one warp: it holds no other part of the GPU, and it gives up after
a bound, leaving word of the peer it waited for.  docs/kernels.md argues why no order of lanes can
deadlock.  Peers are given as int64 tensors of addresses in this process's address space.

Kernels that are given `sglang_afd.kernels.stamps` leave moments there, if those are armed.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_afd.kernels.stamps import (
    CAME,
    RETURN,
    RETURNED,
    SEND,
    SENT,
    SUMMED,
    WAIT,
    mask_of,
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

AT_ONCE = os.environ.get("SGLANG_AFD_FLAGS_AT_ONCE") == "1"
"""Flags of several peers are raised and awaited together, not one after the other.  Has not run
on a GPU yet, so it must be asked for (docs/kernels.md)."""
INTERPRETED = triton.knobs.runtime.interpret
"""The kernels run in Triton's interpreter, on CPU tensors."""

_SEND, _SENT, _SUMMED = tl.constexpr(SEND), tl.constexpr(SENT), tl.constexpr(SUMMED)
_WAIT, _CAME = tl.constexpr(WAIT), tl.constexpr(CAME)
_RETURN, _RETURNED = tl.constexpr(RETURN), tl.constexpr(RETURNED)


@triton.jit
def store_exchange_number(flag, number):
    """Publish: who reads `number` there also sees all that this block's threads wrote before."""
    tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def raise_flags(
    flag_addresses,
    first,
    count,
    numbers,
    STRIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PEERS: tl.constexpr,
):
    """Raise flags `first` .. `first + count - 1`, in the block where `is_last` was true.

    Flag f gets the number at ``numbers + f * STRIDE``.  At once: each thread releases a flag.  What
    other blocks wrote happened before the ticket's addition, which one thread acquired, and that
    before the barrier behind it, so every thread's release covers it.
    """
    if AT_ONCE:
        peers = first + tl.arange(0, PEERS)
        inside = peers < first + count
        flags = tl.load(flag_addresses + peers, mask=inside, other=0)
        number = tl.load(numbers + peers * STRIDE, mask=inside, other=0)
        tl.atomic_xchg(
            flags.to(tl.pointer_type(tl.int64)), number, mask=inside, sem="release", scope="sys"
        )
    else:
        for peer in range(first, first + count):
            flag = tl.load(flag_addresses + peer).to(tl.pointer_type(tl.int64))
            store_exchange_number(flag, tl.load(numbers + peer * STRIDE))


@triton.jit
def is_last(ticket):
    """True in the last block of the grid to come here; what the others wrote is then visible."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1
    if last:
        tl.store(ticket, 0)
    return last


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


@triton.jit
def _leave_word(failure, late, peers, numbers):
    """Write the first late peer and its exchange for the host."""
    peer = tl.min(tl.where(late, peers, 2147483647), axis=0)
    number = tl.max(tl.where(peers == peer, numbers, 0), axis=0)
    tl.store(failure + 1, number)
    tl.atomic_xchg(failure, tl.cast(peer + 1, tl.int64), sem="release", scope="sys")


@_compiled_once
def _wait(
    flags,
    exchanges,
    first,
    count,
    failure,
    bound_ns,
    stamps,
    COUNTS_HERE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PEERS: tl.constexpr,
    STAMPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if STAMPS:
        stamp(stamps, tl.load(exchanges + first) + 1, _WAIT, STAMPS, INTERPRETED)
    if AT_ONCE:
        peers = first + tl.arange(0, PEERS)
        inside = peers < first + count
        if COUNTS_HERE:
            numbers = tl.load(exchanges + peers, mask=inside, other=0) + 1
        else:
            numbers = tl.load(exchanges) + tl.zeros([PEERS], dtype=tl.int64)
        seen = tl.load(flags + peers, mask=inside, other=0, volatile=True)
        late = inside & (seen < numbers)
        if INTERPRETED:
            if tl.max(late.to(tl.int32), axis=0) > 0:
                _leave_word(failure, late, peers, numbers)
        else:
            began = tl.extra.cuda.globaltimer()
            while tl.max(late.to(tl.int32), axis=0) > 0:
                seen = tl.load(flags + peers, mask=inside, other=0, volatile=True)
                late = inside & (seen < numbers)
                if tl.extra.cuda.globaltimer() - began > bound_ns:
                    _leave_word(failure, late, peers, numbers)
                    tl.inline_asm_elementwise(
                        "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                    )
        tl.atomic_add(flags + peers, numbers * 0, mask=inside, sem="acquire", scope="sys")
        if COUNTS_HERE:
            tl.store(exchanges + peers, numbers, mask=inside)
    else:
        for peer in range(first, first + count):
            if COUNTS_HERE:
                number = tl.load(exchanges + peer) + 1
            else:
                number = tl.load(exchanges)
            seen = tl.load(flags + peer, volatile=True)
            if INTERPRETED:
                if seen < number:
                    tl.store(failure + 1, number)
                    tl.store(failure, peer + 1)
            else:
                began = tl.extra.cuda.globaltimer()
                while seen < number:
                    seen = tl.load(flags + peer, volatile=True)
                    if tl.extra.cuda.globaltimer() - began > bound_ns:
                        tl.store(failure + 1, number)
                        tl.atomic_xchg(
                            failure, tl.cast(peer + 1, tl.int64), sem="release", scope="sys"
                        )
                        tl.inline_asm_elementwise(
                            "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                        )
            tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys")
            if COUNTS_HERE:
                tl.store(exchanges + peer, number)
    if STAMPS:
        stamp(stamps, tl.load(exchanges + first), _CAME, STAMPS, INTERPRETED)


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


class Failure(NamedTuple):
    """What a wait that gave up left behind."""

    peer: int
    """Index of the flag that did not come."""
    exchange: int
    """The exchange that was waited for."""


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
        **_stamped(stamps),
        num_warps=WARPS,
    )


def wait(
    flags: torch.Tensor,
    exchanges: torch.Tensor,
    *,
    first: int,
    count: int,
    failure: torch.Tensor,
    seconds: float,
    counts_here: bool,
    stamps: torch.Tensor | None = None,
) -> None:
    """Hold the stream until flags `first` .. `first + count - 1` show the present exchange.

    Args:
        flags: int64, one a peer.
        exchanges: int64; with `counts_here` one a peer, going up by one when its flag has come,
            else [1], the count that `send_rows` has raised.
        failure: [2] int64 that the host can read at any time, zero: see `failure_of`.
        seconds: the bound; past it the kernel traps, which ends this process's use of the GPU.
    """
    _wait[(1,)](
        flags,
        exchanges,
        first,
        count,
        failure,
        int(seconds * 1e9),
        stamps if stamps is not None else exchanges,
        COUNTS_HERE=counts_here,
        AT_ONCE=AT_ONCE,
        PEERS=triton.next_power_of_2(flags.shape[0]),
        **_stamped(stamps),
        num_warps=1,
    )


def failure_of(failure: torch.Tensor) -> Failure | None:
    """What the waits that share `failure` left in it; None if all came through so far."""
    peer, exchange = failure.tolist()
    return Failure(peer - 1, exchange) if peer else None


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
        **_stamped(stamps),
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
        **_stamped(stamps),
    )


def _stamped(stamps: torch.Tensor | None) -> dict[str, int | bool]:
    """The kernels' constants for stamps; 0: none are given."""
    return {"STAMPS": 0 if stamps is None else mask_of(stamps), "INTERPRETED": INTERPRETED}
