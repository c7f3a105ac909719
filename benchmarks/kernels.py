"""What each rank's GPU did in some decode steps, from the profiles that SGLang's profiler wrote.

Kernels of the nvlink transport that wait for a peer spin on one multiprocessor; all others do work.
Times are unions of intervals, so that kernels beside one another count once.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_FILE = re.compile(r"-TP-(\d+).*\.trace\.json\.gz$")
WAITS = ("_wait", "_take_turn")
"""Kernels that wait for the other role, or for another lane."""
EXCHANGE = ("_send_rows", "_send_drawn", "_return_rows", "_sum_replies", "_end_turn", *WAITS)
"""Kernels of the exchange."""
LAUNCH = "cudaGraphLaunch"

Interval = tuple[float, float]


class NoProfile(RuntimeError):
    """The server wrote no profile, or one that tells nothing."""


class Kernel(NamedTuple):
    """One kernel or copy on the device; microseconds."""

    name: str
    start: float
    end: float
    stream: int
    launch: int
    """The call that launched it, shared by all kernels of a graph."""


class Gpu(msgspec.Struct, kw_only=True, frozen=True):
    """One rank's GPU; milliseconds of a step, in the mean of the window."""

    rank: int
    steps: int
    window_ms: float
    """The time from step to step."""
    work_ms: float
    """Of it, with a kernel under way that does not wait."""
    exchange_ms: float
    """With only kernels of the exchange among those."""
    waiting_ms: float
    """With nothing but waits under way."""
    idle_ms: float
    """With no kernel at all."""
    kernel_ms: float
    """The sum over all kernels that do not wait; more than `work_ms` if some ran side by side."""
    kernels: int
    """Launched in a step, waits and copies included."""
    launched_ahead: float | None
    """Share of the graph launches that the host made before the graph before it, on the same
    stream, had ended; None without graphs."""


def of_folder(folder: Path, steps: int, seconds: float) -> list[Gpu]:
    """What the profiles in `folder` tell, by rank; waits up to `seconds` until they are written.

    Raises:
        NoProfile: none came, or one tells of no kernel.
    """
    deadline, sizes = time.monotonic() + seconds, [-1]
    while True:
        files = sorted(file for file in folder.glob("*.trace.json.gz") if _FILE.search(file.name))
        before, sizes = sizes, [file.stat().st_size for file in files]
        if files and sizes == before and min(sizes) > 0:
            break
        if time.monotonic() > deadline:
            raise NoProfile(f"the server wrote no whole profile within {seconds:g} s")
        time.sleep(1.0)
    return [gpu_of(_events(file), _rank(file), steps) for file in files]


def gpu_of(events: Iterable[dict[str, Any]], rank: int, steps: int) -> Gpu:
    """What the events of one rank's profile tell.

    Args:
        events: of Chrome's trace format, as PyTorch writes it.
        steps: how many there are, where no graph tells: else the window goes from the first to the
            last replay of a lane.

    Raises:
        NoProfile: there is no kernel.
    """
    found, launches = _read(events)
    if not found:
        raise NoProfile(f"the profile of rank {rank} has no kernel")
    graphs = _graphs(found, launches)
    begin, end = min(k.start for k in found), max(k.end for k in found)
    if graphs:
        lane = max(graphs.values(), key=len)
        if len(lane) < 2:
            raise NoProfile(f"the profile of rank {rank} has no two steps of a lane")
        begin, end, steps = lane[0].start, lane[-1].start, len(lane) - 1
    inside = [k for k in found if k.end > begin and k.start < end]
    working = [k for k in inside if not _is(k, WAITS)]

    def covered(kernels: Iterable[Kernel]) -> float:
        clipped = ((max(k.start, begin), min(k.end, end)) for k in kernels)
        return _length(_union(clipped)) / (1000 * steps)

    window, work, busy = (end - begin) / (1000 * steps), covered(working), covered(inside)
    return Gpu(
        rank=rank,
        steps=steps,
        window_ms=window,
        work_ms=work,
        exchange_ms=work - covered(k for k in working if not _is(k, EXCHANGE)),
        waiting_ms=busy - work,
        idle_ms=window - busy,
        kernel_ms=sum(k.end - k.start for k in working) / (1000 * steps),
        kernels=round(len(inside) / steps),
        launched_ahead=_launched_ahead(graphs.values()),
    )


class _Graph(NamedTuple):
    start: float
    end: float
    launched: float


def _read(events: Iterable[dict[str, Any]]) -> tuple[list[Kernel], dict[int, float]]:
    """The kernels, and when the host launched each graph."""
    found, launches = [], {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, end = event["ts"], event["ts"] + event["dur"]
            stream, launch = args.get("stream", 0), args.get("correlation", 0)
            found.append(Kernel(event["name"], start, end, stream, launch))
        elif event.get("name", "").startswith(LAUNCH):
            launches[args.get("correlation", 0)] = float(event["ts"])
    return found, launches


def _graphs(found: Sequence[Kernel], launches: dict[int, float]) -> dict[int, list[_Graph]]:
    """The replays of graphs of more than one kernel by the stream of their first, in order."""
    parts: dict[int, list[Kernel]] = {}
    for kernel in found:
        if kernel.launch in launches:
            parts.setdefault(kernel.launch, []).append(kernel)
    graphs: dict[int, list[_Graph]] = {}
    for launch, kernels in parts.items():
        if len(kernels) > 1:
            first = min(kernels, key=lambda k: k.start)
            graph = _Graph(first.start, max(k.end for k in kernels), launches[launch])
            graphs.setdefault(first.stream, []).append(graph)
    return {stream: sorted(replays) for stream, replays in graphs.items()}


def _launched_ahead(lanes: Iterable[Sequence[_Graph]]) -> float | None:
    pairs = [pair for replays in lanes for pair in pairwise(replays)]
    ahead = [after.launched < before.end for before, after in pairs]
    return sum(ahead) / len(ahead) if ahead else None


def _is(kernel: Kernel, names: Sequence[str]) -> bool:
    return any(kernel.name == name or kernel.name.startswith(f"{name}_0d") for name in names)


def _union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """The same time without overlaps, in order."""
    start = end = None
    for begin, stop in sorted(intervals):
        if start is None or end is None:
            start, end = begin, stop
        elif begin > end:
            yield start, end
            start, end = begin, stop
        else:
            end = max(end, stop)
    if start is not None and end is not None:
        yield start, end


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file) as text:
        return json.load(text)["traceEvents"]


def _rank(file: Path) -> int:
    match = _FILE.search(file.name)
    assert match is not None, "chosen by it"
    return int(match[1])
