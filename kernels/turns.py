"""Turns of lanes on one GPU: a lock that hands the GPU's work to one lane after the other.

Two lanes whose kernels run side by side take twice as long each, and so stay side by side: both
then wait for the other role at the same time.  A lane that takes turns works alone, and the other
one, which came a moment later, is then out of step with it for good (docs/kernels.md).

Lanes pass one another no data, so the lock orders none.  A turn is taken in the order of coming.
What runs within one must never wait for a peer, so every turn ends by itself.  Like the exchange's
waits, `take_turn` is one block of one warp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_afd.kernels.flags import trap


@triton.jit
def _take_turn(turns, bound_ns):
    mine = tl.atomic_add(turns, 1, sem="relaxed", scope="gpu")
    began = tl.extra.cuda.globaltimer()
    ended = tl.load(turns + 1, volatile=True)
    while ended < mine:
        ended = tl.load(turns + 1, volatile=True)
        if tl.extra.cuda.globaltimer() - began > bound_ns:
            trap()


@triton.jit
def _end_turn(turns):
    tl.atomic_add(turns + 1, 1, sem="relaxed", scope="gpu")


def take_turn(turns: torch.Tensor, *, seconds: float) -> None:
    """Hold the stream until all turns that were taken before have ended.

    Args:
        turns: [2] int64 on a CUDA device, zero at first: turns taken, turns ended.
        seconds: the bound; past it the kernel traps, which ends this process's use of the GPU.
    """
    _take_turn[(1,)](turns, int(seconds * 1e9), num_warps=1)


def end_turn(turns: torch.Tensor) -> None:
    """End the turn that the stream has taken."""
    _end_turn[(1,)](turns, num_warps=1)
