"""Records of benchmarks as tests want them."""

from __future__ import annotations

from typing import Any

from benchmarks.record import VERSION, Record, Turn, Verdict, concluded


def turn(system: str, round: int, ms: float, **changes: Any) -> Turn:
    """A turn of a decode: 100 requests on 2 GPUs, its steps `ms` long."""
    result = {
        "ms": ms,
        "gpus": 2,
        "requests": 100,
        "problems": [],
        "steps": [],
        **changes.pop("result", {}),
    }
    fields = {"began": "2026-11-30T00:00:00+00:00", "seconds": 1.0, "failed": "", **changes}
    return Turn(system=system, round=round, result={} if fields["failed"] else result, **fields)


def record(*turns: Turn, **changes: Any) -> Record:
    """A record that counts, but for `changes`: systems a and b, two rounds, b twice as fast."""
    own = turns or (turn("a", 1, 20), turn("b", 1, 10), turn("a", 2, 20.2), turn("b", 2, 10.1))
    fields: dict[str, Any] = {
        "version": VERSION,
        "name": "some",
        "kind": "decode",
        "regime": "A regime in words.",
        "created": "2026-11-30T00:00:00+00:00",
        "command": ["python -m benchmarks", "run", "some"],
        "environment": {"gpus": ["NVIDIA H200, GPU-1, 1, 1 MiB"] * 2, "packages": {"sglang": "1"}},
        "configuration": {"systems": {"a": {}, "b": {}}},
        "seed": 1,
        "rounds": 2,
        "baseline": "a",
        "emulated": [],
        "turns": list(own),
        "verdict": Verdict(counts=False, reasons=[], reference="none"),
        **changes,
    }
    return concluded(Record(**fields))
