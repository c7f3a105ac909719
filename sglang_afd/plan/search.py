"""The search: every layout and batch, the best of each kind, and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_afd.plan.errors import PlanError, real, whole
from sglang_afd.plan.layouts import Layout, Refused, layouts
from sglang_afd.plan.ledger import TRANSPORTS
from sglang_afd.plan.profile import GpuProfile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.shape import ModelShape
from sglang_afd.plan.step import Split, Step, afd, cad, colocated
from sglang_afd.plan.workload import Workload

BATCHES = 12
"""Even steps of the batch sizes that are tried for each layout."""


@dataclass(frozen=True)
class Question:
    """What is asked."""

    shape: ModelShape
    gpu: GpuProfile
    gpus: int
    load: Workload
    routing: Routing
    tpot: float | None = None
    """Seconds a token may take."""
    transport: str = "nvlink"
    lanes: tuple[int, ...] = (1, 2, 3)
    kinds: tuple[str, ...] = ("colocated", "afd", "cad")
    graphs: bool = True
    """AFD decodes in CUDA graphs; colocated SGLang always does."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise PlanError(
                "--transport",
                f"the planner knows {', '.join(TRANSPORTS)}, not {self.transport}",
            )
        if self.tpot is not None:
            real("--tpot-ms", self.tpot, above=0.0)
        for lanes in self.lanes:
            whole("--lanes", lanes, most=8)


@dataclass(frozen=True)
class Candidate:
    """A layout at a batch size, and its predicted step."""

    layout: Layout
    step: Step

    @property
    def per_gpu(self) -> float:
        """Tokens a second and GPU."""
        return self.step.per_gpu


@dataclass(frozen=True)
class Answer:
    """Everything that was tried."""

    question: Question
    candidates: list[Candidate]
    refused: list[Refused]

    def best(self, kind: str | None = None) -> Candidate | None:
        """The most tokens a second and GPU within the target, of one kind or of all."""
        fits = [c for c in self.candidates if kind in (None, c.layout.kind) and self.in_time(c)]
        return max(fits, key=lambda c: c.per_gpu, default=None)

    def in_time(self, candidate: Candidate) -> bool:
        """Whether it meets the latency target, if there is one."""
        return self.question.tpot is None or candidate.step.tpot <= self.question.tpot

    def by_layout(self) -> list[Candidate]:
        """Each layout's best, best first; one that is never in time is left out."""
        found: dict[str, Candidate] = {}
        for candidate in filter(self.in_time, self.candidates):
            held = found.get(candidate.layout.name)
            if held is None or candidate.per_gpu > held.per_gpu:
                found[candidate.layout.name] = candidate
        return sorted(found.values(), key=lambda c: -c.per_gpu)

    def pareto(self) -> list[Candidate]:
        """Candidates that none beats in both throughput and TPOT, fastest token first."""
        front: list[Candidate] = []
        for candidate in sorted(self.candidates, key=lambda c: (c.step.tpot, -c.per_gpu)):
            if not front or candidate.per_gpu > front[-1].per_gpu:
                front.append(candidate)
        return front


def search(
    question: Question, *, watch: Callable[[list[Layout]], Iterable[Layout]] = iter
) -> Answer:
    """Try every layout of the question's GPUs.

    Args:
        watch: wraps the list of layouts, e.g. to show progress.

    Raises:
        PlanError: no layout fits at all; the message has the reasons.
    """
    good, refused = layouts(
        question.shape,
        question.gpu,
        question.load,
        question.gpus,
        transport=question.transport,
        lanes=question.lanes,
        kinds=question.kinds,
    )
    if not good:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in refused[:4])
        raise PlanError(
            "--gpus", f"{question.gpus} x {question.gpu.name} fit no layout ({reasons})"
        )
    candidates = [
        Candidate(layout, step_of(question, layout, batch))
        for layout in watch(good)
        for batch in batches(layout)
    ]
    return Answer(question, candidates, refused)


def batches(layout: Layout) -> list[int]:
    """The batch sizes to try: powers of two, and `BATCHES` even steps up to the largest."""
    even = [int(layout.batch * (i + 1) / BATCHES) for i in range(BATCHES)]
    powers = [1 << i for i in range(layout.batch.bit_length())]
    return sorted({max(layout.lanes, size) for size in (*even, *powers)})


def step_of(question: Question, layout: Layout, batch: float) -> Step:
    """The predicted step of a layout at a batch size."""
    given = (question.shape, question.gpu, question.routing, question.load)
    if layout.kind == "colocated":
        return colocated(*given, ranks=layout.attention_ranks, batch=batch)
    split = Split(
        layout.attention_ranks,
        layout.ffn_ranks,
        layout.lanes,
        batch,
        question.transport,
        question.graphs,
    )
    return cad(*given, split) if layout.kind == "cad" else afd(*given, split)
