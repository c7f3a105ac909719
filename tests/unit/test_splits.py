"""How decode attention is cut into pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_afd.kernels.splits import most_splits
from tests.support.interpreted import run_in_interpreter
from tests.support.splits import cost, splits

pytestmark = pytest.mark.unit


def test_kernel_in_the_interpreter() -> None:
    run_in_interpreter(Path(__file__).with_name("splits_in_interpreter.py"))


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (33, 1),  # 132 pieces on 132 processors: nothing is gained by splitting
        (36, 5),  # 144: two rounds of whole contexts, or six of a fifth
        (18, 5),
        (1, 33),  # each of 132 pieces has two of 65 tiles
    ],
)
def test_splits_of_equal_contexts(requests: int, expected: int) -> None:
    """8.2K tokens, 4 KV heads, an H200."""
    most = most_splits(requests, 4, 132)
    assert splits([8220] * requests, 4, 132, most) == [expected] * requests


def test_a_long_context_among_short_ones_is_split_more() -> None:
    found = splits([60_000] + [500] * 31, 4, 132, most_splits(32, 4, 132))
    assert found[0] > 4 and found[1:] == [1] * 31


def test_the_model_orders_what_was_measured() -> None:
    """Microseconds on one H200, 4 KV heads, 8.2K tokens (benchmarks/results/2026-11-30_turns)."""
    measured = {
        36: {65: 195.0, 33: 166.0, 22: 157.9, 17: 155.2, 13: 157.4, 11: 155.9, 5: 167.5},
        33: {65: 132.1, 33: 135.2, 22: 137.3, 17: 139.0, 11: 143.3, 5: 154.3},
        40: {65: 197.3, 33: 172.0, 22: 166.7, 17: 167.3, 11: 174.4, 5: 182.5},
    }
    for requests, times in measured.items():
        costs = {size: cost([65] * requests, size, 4, 132) for size in times}
        chosen = min(costs, key=lambda size: costs[size])
        assert times[chosen] <= 1.02 * min(times.values()), requests
