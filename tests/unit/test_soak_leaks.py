"""What a soak calls a leak."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.soak import Sample, Use, leaks

pytestmark = pytest.mark.unit

MB = 1 << 20


def samples(handles: Callable[[int], int], memory: Callable[[int], float]) -> list[Sample]:
    """Of a process in 30 rounds of 10 s."""
    return [
        Sample(10.0 * i, {"rank": Use(handles(i), int(memory(i) * MB)), "other": Use(9, 90 * MB)})
        for i in range(30)
    ]


def test_what_is_steady_is_none() -> None:
    assert leaks(samples(lambda i: 50 + i % 2, lambda i: 600 + i % 3)) == []


def test_what_a_process_takes_at_first_is_none() -> None:
    assert leaks(samples(lambda i: min(50, 10 + 5 * i), lambda i: min(900, 600 + 60 * i))) == []


def test_files_that_stay_open() -> None:
    [found] = leaks(samples(lambda i: 50 + i, lambda i: 600))
    assert found.startswith("rank has ") and "more files open" in found


def test_memory_that_grows() -> None:
    [found] = leaks(samples(lambda i: 50, lambda i: 600 + 4 * i))
    assert found.startswith("rank has grown by ") and found.endswith(" of 640")


def test_too_few_samples_tell_nothing() -> None:
    assert leaks(samples(lambda i: 50 + 100 * i, lambda i: 600)[:3]) == []
