"""What is made of a torch profile: whose time was work, waiting, or nothing at all."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import NoProfile, gpu_of, of_folder

pytestmark = pytest.mark.unit


def kernel(name: str, start: float, end: float, *, stream: int = 7, launch: int = 0) -> Any:
    args = {"stream": stream, "correlation": launch}
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": args}


def launched(launch: int, at: float) -> Any:
    args = {"correlation": launch}
    return {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": at, "dur": 5, "args": args}


def step(launch: int, start: float, *, host: float, stream: int = 7) -> list[Any]:
    """1 ms: 0.4 of attention, 0.1 of sending, 0.3 of waiting, 0.1 of summing, 0.1 of nothing."""
    parts = [("attention", 0, 400), ("_send_rows", 400, 500), ("_wait", 500, 800)]
    parts.append(("_sum_replies", 800, 900))
    return [launched(launch, host)] + [
        kernel(name, start + a, start + b, stream=stream, launch=launch) for name, a, b in parts
    ]


def test_one_lane() -> None:
    """Three steps make a window of two."""
    events = [event for i in range(3) for event in step(i + 1, 1000.0 * i, host=1000.0 * i - 300)]
    found = gpu_of([*events, {"ph": "M", "name": "process_name"}], 1, 99)
    assert (found.rank, found.steps, found.kernels) == (1, 2, 4)
    assert found.window_ms == pytest.approx(1.0)
    assert found.work_ms == pytest.approx(0.6) and found.exchange_ms == pytest.approx(0.2)
    assert found.waiting_ms == pytest.approx(0.3) and found.idle_ms == pytest.approx(0.1)
    assert found.launched_ahead == 1.0
    late = [event for i in range(3) for event in step(i + 1, 1000.0 * i, host=1000.0 * i - 20)]
    assert gpu_of(late, 1, 99).launched_ahead == 0.0, "each after the one before had ended"


def test_a_lane_that_works_while_another_waits_waits_for_nothing() -> None:
    """Half a step apart: the other's attention covers the wait and the gap, and counts once."""
    events = []
    for i in range(4):
        events += step(2 * i + 1, 1000.0 * i, host=0.0)
        events += step(2 * i + 2, 1000.0 * i + 500, host=0.0, stream=8)
    found = gpu_of(events, 0, 99)
    assert found.steps == 3 and found.window_ms == pytest.approx(1.0)
    assert found.work_ms == pytest.approx(1.0, abs=0.05)
    assert found.waiting_ms + found.idle_ms == pytest.approx(0.0, abs=0.05)
    assert found.kernel_ms == pytest.approx(1.2, abs=0.1), "two lanes' work, side by side in parts"


def test_without_graphs_the_steps_are_those_asked_for() -> None:
    found = gpu_of([kernel("gemm", 0, 1000), kernel("_wait", 1000, 2000)], 0, 2)
    assert found.launched_ahead is None and found.window_ms == pytest.approx(1.0)
    assert found.work_ms == found.waiting_ms == pytest.approx(0.5)


def test_profiles_of_all_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        file = tmp_path / f"1796064808.62-TP-{rank}-DP-{rank}-EP-{rank}.trace.json.gz"
        events = [kernel("gemm", 0, 1000 * (rank + 1))]
        file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert [gpu.work_ms for gpu in of_folder(tmp_path, 1, 5.0)] == [1.0, 2.0]


def test_no_profile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoProfile, match="no whole profile within"):
        of_folder(tmp_path, 1, 0.1)
    with pytest.raises(NoProfile, match="rank 3 has no kernel"):
        gpu_of([launched(1, 0.0)], 3, 1)
