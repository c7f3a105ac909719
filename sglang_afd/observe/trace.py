"""A trace: the stages of some steps of every rank, as a server gives it and a file keeps it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from sglang_afd.observe.stages import StepTimes


class TracedStep(msgspec.Struct, frozen=True):
    """One step of one rank; times are seconds since the epoch."""

    step_id: int
    lane: int
    path: str
    """``decode`` or ``bulk``."""
    rows: int
    """That the rank sends into every MoE layer; on F, that all send."""
    rounds: int
    """Exchanges of every MoE layer."""
    agreed: float
    start: float
    end: float
    interval: float | None
    """As `StepTimes` has it."""
    spans: list[tuple[str, float, float]]
    """(stage, beginning, end) without gaps; empty if the step was replayed from a graph."""


class RankTrace(msgspec.Struct, frozen=True):
    """What one rank recorded."""

    rank: int
    name: str
    role: str
    layers: list[int]
    """The model's MoE layers, in order."""
    asked: int
    """How many steps were asked for; fewer were recorded if fewer ran."""
    steps: list[TracedStep]


class Trace(msgspec.Struct, frozen=True):
    """Traces of all ranks of a deployment."""

    versions: dict[str, str]
    ranks: list[RankTrace]


class BadTrace(ValueError):
    """A file is not a trace; the message says what is wrong with it."""


def read(path: Path) -> Trace:
    """Read a trace that was saved.

    Raises:
        BadTrace: it is none, or it cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Trace)
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BadTrace(f"{path} is not a trace of sglang_afd: {error}") from error


class TraceRecorder:
    """Keeps the next steps of a rank; a listener of its `StepTimer`."""

    def __init__(self, rank: int, name: str, role: str, layers: list[int], asked: int) -> None:
        self._since_epoch = time.time() - time.monotonic()
        self.trace = RankTrace(rank, name, role, layers, asked, [])

    @property
    def complete(self) -> bool:
        """Whether there are as many steps as were asked for."""
        return len(self.trace.steps) == self.trace.asked

    def __call__(self, times: StepTimes) -> None:
        """Keep a step, unless there are enough."""
        if self.complete:
            return
        to = self._since_epoch
        self.trace.steps.append(
            TracedStep(
                times.plan.step_id,
                times.plan.lane,
                times.path.name.lower(),
                times.rows,
                len(times.rounds),
                times.agreed + to,
                times.start + to,
                times.end + to,
                times.interval,
                [(span.stage.value, span.start + to, span.end + to) for span in times.spans],
            )
        )
