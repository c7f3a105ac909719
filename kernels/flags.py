"""Flags between ranks: how one says that its part of an exchange is done, and another waits for it.

A flag holds the number of the exchange, counted on the device, so that a captured graph can be
replayed.  A wait is one block of one warp: it holds no other part of the GPU, and it gives up after
a bound, leaving word of the peer it waited for.  docs/kernels.md argues why no order of lanes can
deadlock.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_afd.kernels.stamps import CAME, WAIT, constants_of, stamp

AT_ONCE = os.environ.get("SGLANG_AFD_FLAGS_AT_ONCE") == "1"
"""Flags of several peers are raised and awaited together, not one after the other.  Has not run
on a GPU yet, so it must be asked for (docs/kernels.md)."""
_WAIT, _CAME = tl.constexpr(WAIT), tl.constexpr(CAME)


@triton.jit
def trap():
    """End this process's use of the GPU."""
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


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
def _leave_word(failure, late, peers, numbers):
    """Write the first late peer and its exchange for the host."""
    peer = tl.min(tl.where(late, peers, 2147483647), axis=0)
    number = tl.max(tl.where(peers == peer, numbers, 0), axis=0)
    tl.store(failure + 1, number)
    tl.atomic_xchg(failure, tl.cast(peer + 1, tl.int64), sem="release", scope="sys")


@triton.jit(do_not_specialize=["first", "count"])
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
                    trap()
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
                        trap()
            tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys")
            if COUNTS_HERE:
                tl.store(exchanges + peer, number)
    if STAMPS:
        stamp(stamps, tl.load(exchanges + first), _CAME, STAMPS, INTERPRETED)


class Failure(NamedTuple):
    """What a wait that gave up left behind."""

    peer: int
    """Index of the flag that did not come."""
    exchange: int
    """The exchange that was waited for."""


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
        **constants_of(stamps),
        num_warps=1,
    )


def failure_of(failure: torch.Tensor) -> Failure | None:
    """What the waits that share `failure` left in it; None if all came through so far."""
    peer, exchange = failure.tolist()
    return Failure(peer - 1, exchange) if peer else None
