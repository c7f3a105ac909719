"""Moments within exchanges, taken on the device: what steps that a CUDA graph replays tell.

A channel's stamps are one int64 tensor of rows of `FIELDS`.  The first row is its head; exchange n
writes into row 1 + n modulo the others, whose number is a power of two: its number, then one moment
for each of its parts.  While the head is not armed nothing is written.  Moments are the GPU's
``%globaltimer``, nanoseconds that only differences of are used; in Triton's interpreter a count of
the moments that were taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FIELDS = 8
"""Places of a row."""
NUMBER = 0
"""Place of the exchange's number in a row."""
SEND, SENT, SUMMED = 1, 2, 3
"""On A ranks: rows begin to be sent, have been sent, have come back and are summed."""
WAIT, CAME, RETURN, RETURNED = 1, 2, 3, 4
"""On F ranks: the wait for rows begins, ends; rows begin to go back, have gone back."""
ARMED, ANCHOR, TICKS = 0, 1, 2
"""Places in the head: whether moments are taken; when `anchor` came; the interpreter's count."""

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def moment(stamps, INTERPRETED: tl.constexpr):
    """The present moment."""
    if INTERPRETED:
        now = tl.atomic_add(stamps + 2, 1)
    else:
        now = tl.extra.cuda.globaltimer()
    return now


@triton.jit
def stamp(stamps, number, place, MASK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Write the present moment into a place of exchange `number`'s row; by one block."""
    if tl.load(stamps) != 0:
        row = stamps + ((number & MASK) + 1) * 8
        tl.store(row, number)
        tl.store(row + place, moment(stamps, INTERPRETED))


@triton.jit
def stamp_first(stamps, number, place, MASK: tl.constexpr, INTERPRETED: tl.constexpr):
    """As `stamp`, by the first of the grid's blocks alone."""
    if tl.program_id(0) == 0:
        stamp(stamps, number, place, MASK, INTERPRETED)


@triton.jit
def stamp_latest(stamps, number, place, MASK: tl.constexpr, INTERPRETED: tl.constexpr):
    """As `stamp`, by several blocks: the last one's moment stays."""
    if tl.load(stamps) != 0:
        row = stamps + ((number & MASK) + 1) * 8
        tl.atomic_max(row + place, moment(stamps, INTERPRETED))


@triton.jit
def _anchor(stamps, INTERPRETED: tl.constexpr):
    tl.store(stamps + 1, moment(stamps, INTERPRETED))


def new_stamps(exchanges: int, device: torch.device) -> torch.Tensor:
    """Stamps with rows for the last `exchanges` exchanges at least, not armed."""
    rows = triton.next_power_of_2(max(2, exchanges))
    return torch.zeros(1 + rows, FIELDS, dtype=torch.int64, device=device)


def mask_of(stamps: torch.Tensor) -> int:
    """MASK of the kernels above; never 0, which says that there are none."""
    return stamps.shape[0] - 2


def anchor(stamps: torch.Tensor) -> None:
    """Write into the head when the stream has come here, armed or not."""
    _anchor[(1,)](stamps, INTERPRETED=INTERPRETED, num_warps=1)


def constants_of(stamps: torch.Tensor | None) -> dict[str, int | bool]:
    """What kernels are compiled for, of a channel's stamps; None: they leave no moments."""
    return {"STAMPS": 0 if stamps is None else mask_of(stamps), "INTERPRETED": INTERPRETED}
