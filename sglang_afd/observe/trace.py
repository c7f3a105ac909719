"""A trace: the stages of some steps of every rank, as a server gives it and a file keeps it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import torch

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
    """(stage, beginning, end) without gaps; empty if nothing tells them."""
    expert_rows: list[list[int]] | None = None
    """F: rows that each slot got in each MoE layer; None if the step was replayed."""


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
    experts: list[list[int]] = []
    """F: the expert in each of its slots, for each MoE layer."""
    slots: int = 0
    """F: of a layer on all F ranks together."""


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

    def __init__(
        self,
        rank: int,
        name: str,
        role: str,
        layers: list[int],
        asked: int,
        experts: list[list[int]],
        slots: int,
    ) -> None:
        self._since_epoch = time.time() - time.monotonic()
        self.trace = RankTrace(rank, name, role, layers, asked, [], experts, slots)

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
                _by_layer(times.loads, len(self.trace.layers)),
            )
        )


def _by_layer(loads: torch.Tensor | None, layers: int) -> list[list[int]] | None:
    """[layers x rounds, E_local] rows of each exchange -> those of each layer."""
    return None if loads is None else loads.unflatten(0, (layers, -1)).sum(1).tolist()


def expert_counts(trace: Trace) -> list[list[int]]:
    """Rows that each expert got in all steps: one list for every decoder layer up to the last.

    Raises:
        BadTrace: no step of an FFN rank has them, or ranks are missing.
    """
    counted = [
        (rank, step.expert_rows)
        for rank in trace.ranks
        for step in rank.steps
        if step.expert_rows is not None and rank.experts
    ]
    if not any(rank.steps for rank in trace.ranks):
        raise BadTrace("no rank made a step; send requests while it is recorded")
    if not counted:
        raise BadTrace(
            "no step in the trace tells what each expert got: replayed ones do not; record while "
            "prompts come in, or start the server with --disable-cuda-graph"
        )
    told = {rank.rank: len(rank.experts[0]) for rank, _ in counted}
    if sum(told.values()) < counted[0][0].slots:
        raise BadTrace(
            f"the trace tells of {sum(told.values())} of {counted[0][0].slots} slots: with "
            f"--afd-attention-tp only the first of each FFN rank's world ranks is asked, and FFN "
            f"ranks whose steps were all replayed tell nothing"
        )
    experts = 1 + max(expert for rank, _ in counted for row in rank.experts for expert in row)
    found = [[0] * experts for _ in range(1 + max(counted[0][0].layers))]
    for rank, rows in counted:
        for layer, held, row in zip(rank.layers, rank.experts, rows, strict=True):
            for expert, number in zip(held, row, strict=True):
                found[layer][expert] += number
    return found
