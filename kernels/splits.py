"""How decode attention cuts its work: into as many pieces as a GPU has processors, or nearly.

FlashAttention-3 gives a processor one request and KV head at a time.  144 of them on 132 processors
take twice as long as 132, so a request's context is split where that evens the load out.  FA3
plans splits by itself too, but asks only whether each processor has enough to do: measured on one
H200, 36 requests of 8K tokens with 4 KV heads take 198 us with its plan and 157 with this one
(benchmarks/results/2026-11-30_turns).

The plan is FA3's ``scheduler_metadata`` of a decode step (hopper/flash_api.cpp in Dao-AILab's
flash-attention), which says of every request how many splits it has; any numbers are right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 128
"""Tokens that FA3 takes at a time, for heads of 128 elements; others are planned a bit off."""
BEGIN = 2
"""What beginning a piece costs, in tiles: fits the measured times (see above) within 5 %."""
MOST_REQUESTS = 992
"""FA3 plans no splits for more."""
_CACHED = 128
"""Tiles of one KV head, keys and values, that FA3 takes as fitting the L2 cache."""


def most_splits(requests: int, kv_heads: int, processors: int) -> int:
    """How many splits a request may have; each takes memory for an output of its own.

    Enough that few requests of long contexts still give every processor something.
    """
    needed = triton.cdiv(4 * processors, max(1, requests * kv_heads))
    return min(64, max(8, triton.next_power_of_2(needed)))


def plan_size(requests: int) -> int:
    """How many int32 the plan of so many requests takes."""
    return 4 * triton.cdiv(requests, 4) * 4 + 1


@triton.jit(do_not_specialize=["requests", "rounded"])
def _plan_splits(
    lengths,
    plan,
    requests,
    rounded,
    KV_HEADS: tl.constexpr,
    PROCESSORS: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    BEGIN: tl.constexpr,
    CACHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.arange(0, BLOCK)
    inside = rows < requests
    length = tl.load(lengths + rows, mask=inside, other=0)
    tiles = tl.where(inside, tl.maximum((length + TILE - 1) // TILE, 1), 0)
    longest = tl.max(tiles, axis=0)
    piece = longest
    least = longest * 0 + 2147483647
    for parts in range(1, MOST + 1):
        size = (longest + parts - 1) // parts
        pieces = tl.sum((tiles + size - 1) // size, axis=0) * KV_HEADS
        cost = (pieces + PROCESSORS - 1) // PROCESSORS * (size + BEGIN)
        piece = tl.where(cost < least, size, piece)
        least = tl.minimum(cost, least)
    splits = tl.maximum((tiles + piece - 1) // piece, 1)
    each = (tiles + splits - 1) // splits
    # heads whose keys and values fit the cache are taken one after the other
    fit = tl.where(each * 16 <= CACHED, 16, tl.where(each * 8 <= CACHED, 8, 1))
    fit = tl.where(
        fit > 1, fit, tl.where(each * 4 <= CACHED, 4, tl.where(each * 2 <= CACHED, 2, 1))
    )
    tl.store(plan + rows, splits, mask=inside)
    tl.store(plan + rounded + rows, 1, mask=inside)  # a query's heads are one block
    tl.store(plan + 2 * rounded + rows, rows, mask=inside)  # in the order of the batch
    tl.store(plan + 3 * rounded + rows, tl.minimum(fit, KV_HEADS), mask=inside)
    tl.store(plan + 4 * rounded, 0)  # pieces that are begun


def plan_splits(
    lengths: torch.Tensor, *, kv_heads: int, processors: int, most: int
) -> torch.Tensor:
    """Plan a decode step's attention: FA3's ``scheduler_metadata``, causal, one query a request.

    Of all equal sizes of pieces with up to `most` in the longest request, the one with the least
    ``ceil(pieces / processors) * (size + BEGIN)``.

    Args:
        lengths: [n] int32, tokens of context, n from 1 to `MOST_REQUESTS`.
        kv_heads: of the rank; query heads of one KV head are 64 at most.
        processors: multiprocessors of the GPU.
        most: splits of a request at most, as FA3's ``num_splits``.

    Returns:
        [plan_size(n)] int32: splits, query blocks, place in the batch, heads in the cache of each
        request, each part of n rounded up to 4, and a zero.
    """
    requests = lengths.shape[0]
    assert 1 <= requests <= MOST_REQUESTS
    plan = torch.empty(plan_size(requests), dtype=torch.int32, device=lengths.device)
    _plan_splits[(1,)](
        lengths,
        plan,
        requests,
        triton.cdiv(requests, 4) * 4,
        KV_HEADS=kv_heads,
        PROCESSORS=processors,
        MOST=most,
        TILE=TILE,
        BEGIN=BEGIN,
        CACHED=_CACHED,
        BLOCK=triton.next_power_of_2(requests),
    )
    return plan
