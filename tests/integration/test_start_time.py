"""Worlds are cheap: hundreds of configurations can be tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import pytest

from tests.support.world import Start, World, Worlds

pytestmark = pytest.mark.integration

WITHIN = 15.0  # seconds
QUIET = 0.1  # share of the cores that others may take


def in_time(starts: Sequence[Start]) -> bool | None:
    """Whether the median start is in time; None if others may be why it is not.

    Worlds that had the cores for themselves count; without one, all of them do if they were quick
    all the same.
    """
    quiet = [start.seconds for start in starts if start.others < QUIET]
    if quiet:
        return median(quiet) <= WITHIN
    return True if median(start.seconds for start in starts) <= WITHIN else None


def test_a_world_starts_in_seconds(worlds: Worlds, start: Callable[..., World]) -> None:
    """The median of this session's worlds."""
    start(["--afd-attention-ranks", "2", "--afd-ffn-ranks", "1"]).wait_healthy()
    answer = in_time(worlds.starts())
    if answer is None:
        pytest.skip(f"others took the cores from each of {len(worlds.starts())} worlds")
    assert answer, worlds.starts()


@pytest.mark.parametrize(
    ("starts", "answer"),
    [
        ([(9.0, 0.0), (14.0, 0.05), (40.0, 0.02)], True),
        ([(9.0, 0.0), (16.0, 0.05), (40.0, 0.02)], False),
        ([(9.0, 0.8), (9.0, 0.9), (16.0, 0.02)], False),
        ([(9.0, 0.0), (40.0, 0.6), (50.0, 0.6)], True),
        ([(40.0, 0.6), (12.0, 0.3), (9.0, 0.5)], True),
        ([(40.0, 0.6), (20.0, 0.3)], None),
    ],
)
def test_the_check_can_fail(starts: list[tuple[float, float]], answer: bool | None) -> None:
    assert in_time([Start(*start) for start in starts]) is answer
