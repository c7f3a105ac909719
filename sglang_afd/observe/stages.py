"""The stages of a step on one rank: when it computed, sent, and waited for the other role.

A step of an A rank is attention (all that the model does outside of its experts), dispatch and
combine; one of an F rank is receive, experts and reply.  In CAD mode model ranks dispatch and
combine, and attention ranks receive and reply.  The exchange's stages are marked as they
begin and end; what lies between them is the role's own work.  A decode round that is replayed from
a CUDA graph passes no mark: where its kernels leave `Stamps`, those tell its stages.  With
speculation an A rank's step verifies, and beside it the rank drafts before, then samples and lets
the draft read what was accepted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch

from sglang_afd.dispatch.step_plan import Path, Round, StepPlan
from sglang_afd.dispatch.transport import MaskedBatch, RowBatch


class Stage(StrEnum):
    """What a rank does in a part of its step."""

    ATTENTION = "attention"
    MODEL = "model"
    """Of a model rank: all that is not attention."""
    DISPATCH = "dispatch"
    COMBINE = "combine"
    """A: waiting for F's rows, and summing them."""
    RECEIVE = "receive"
    """F: waiting for A's rows, and taking them in."""
    EXPERTS = "experts"
    REPLY = "reply"
    DRAFT = "draft"
    """A, before a step that verifies: the draft's steps."""
    SAMPLE = "sample"
    """A, after it: which tokens are accepted."""
    DRAFT_EXTEND = "draft_extend"
    """A, after that: the draft reads the target's hidden states of the accepted tokens."""


EXCHANGE = (Stage.DISPATCH, Stage.COMBINE, Stage.RECEIVE, Stage.REPLY)
"""Stages in which a rank does none of its role's own work."""


class Span(NamedTuple):
    """A stage's beginning and end, in seconds of the rank's clock."""

    stage: Stage
    start: float
    end: float


class StepTimes(NamedTuple):
    """One step of one rank, or one path of it where paths run beside each other."""

    plan: StepPlan
    rounds: tuple[Round, ...]
    """The exchanges of every MoE layer that the rank took part in; at least one."""
    path: Path
    """How the rank's rows travel; on F the first path that has some."""
    rows: int
    """Of this rank in every layer of them; on F those of all ranks."""
    agreed: float
    """When the ranks agreed on the plan, in seconds of `time.monotonic`."""
    start: float
    end: float
    interval: float | None
    """Seconds from the beginning of the lane's step before; None if the rank had none there in
    between, or nobody had any."""
    spans: tuple[Span, ...]
    """Without gaps from `start` to `end`; empty if nothing tells them."""
    loads: torch.Tensor | None
    """F: [exchanges, E_local] int64 on the host, rows that each expert got; None if replayed."""
    replayed: bool = False
    """The step was replayed from a graph."""
    beside: tuple[Span, ...] = ()
    """A, in a decode step: what the lane did outside of steps since its last one: drafts, samples
    and extends of drafts."""

    def by_stage(self) -> dict[Stage, float]:
        """Seconds spent in each stage."""
        spent: dict[Stage, float] = {}
        for stage, start, end in self.spans:
            spent[stage] = spent.get(stage, 0.0) + end - start
        return spent

    def exchanging(self) -> float:
        """Seconds without own work."""
        return sum(spent for stage, spent in self.by_stage().items() if stage in EXCHANGE)


Spent = tuple[Stage, float, float]
"""A stage of an exchange: beginning and end, in seconds since a step's beginning."""


class Stamps(Protocol):
    """What the kernels of a lane's decode round tell of their moments, also in a graph."""

    def arm(self, on: bool) -> None:
        """Let them take moments, or not."""

    def begin(self) -> None:
        """A step begins in the current stream."""

    def take(self) -> Any:
        """The moments of the step that ends in the current stream, once that has come here."""

    def spent(self, taken: Any) -> list[Spent]:
        """The step's stages, in order; empty if the kernels took no moments from its beginning.
        Asked once for each `take`."""


class Clock(Protocol):
    """Tells when the work submitted so far has been done."""

    def mark(self) -> Any:
        """The present moment, as the clock can tell without waiting for a device."""

    def passed(self, mark: Any) -> bool:
        """Whether `mark`, the last one given, can be told in seconds yet."""

    def seconds(self, mark: Any) -> float:
        """A mark in seconds of `time.monotonic`; marks are asked for in the order they came."""


class HostClock:
    """Work that has been submitted has been done: the CPU's clock."""

    def mark(self) -> float:
        """Now."""
        return time.monotonic()

    def passed(self, mark: float) -> bool:
        """It always has."""
        return True

    def seconds(self, mark: float) -> float:
        """The mark itself."""
        return mark


class DeviceClock:
    """Marks in the current CUDA stream; seconds grow from a moment at which the device was idle."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._last, self._seconds = self.mark(), time.monotonic()

    def mark(self) -> torch.cuda.Event:
        """An event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the stream has come to it."""
        return mark.query()

    def seconds(self, mark: torch.cuda.Event) -> float:
        """From mark to mark: the difference of far ones would lose its digits."""
        self._seconds += self._last.elapsed_time(mark) / 1000
        self._last = mark
        return self._seconds


class _Open(NamedTuple):
    plan: StepPlan
    rounds: tuple[Round, ...]
    path: Path
    rows: int
    agreed: float
    follows: bool
    start: Any
    stamps: Stamps | None
    marks: list[tuple[Stage, Any, Any]]
    loads: list[torch.Tensor]


class _Beside(NamedTuple):
    lane: int
    stage: Stage
    start: Any


class _Noted:
    """A stage as it goes on; hundreds are made in a step."""

    __slots__ = ("_clock", "_marks", "_stage", "_start")

    def __init__(self, stage: Stage, marks: list[tuple[Stage, Any, Any]], clock: Clock) -> None:
        self._stage, self._marks, self._clock = stage, marks, clock

    def __enter__(self) -> None:
        self._start = self._clock.mark()

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._stage, self._start, self._clock.mark()))


_NOT_NOTED = nullcontext()


class StepTimer:
    """Times this rank's steps, for those who asked; costs next to nothing while nobody does."""

    def __init__(
        self,
        own_work: Stage,
        clock: Callable[[], Clock],
        *,
        rank: int | None,
        experts: int,
        sources: int = 1,
        pause: int = 1,
    ) -> None:
        """Make a timer that nobody listens to.

        Args:
            own_work: what the rank does outside of the exchange.
            clock: makes its clock, when somebody first listens.
            rank: whose rows are its work; None: everybody's are.
            experts: how many it has of a layer.
            sources: rows that come in decode for one that a rank announces, see
                `sglang_afd.emulation`.
            pause: how many plans in a row in which nobody has anything end a sequence of steps.
        """
        self._own_work, self._make_clock, self._rank = own_work, clock, rank
        self._experts, self._sources = experts, sources
        self._clock: Clock | None = None
        self._listeners: tuple[Callable[[StepTimes], None], ...] = ()
        self._open: _Open | None = None
        self._ended: deque[tuple[_Open | _Beside, Any, Any]] = deque()
        self._stamps: Sequence[Stamps] = ()
        self._beside: dict[int, list[Span]] = {}
        self._agreed = 0.0
        self._empty, self._pause = 0, pause
        """Plans in a row in which nobody had anything."""
        self._going: set[tuple[int, Path]] = set()
        self._starts: dict[tuple[int, Path], float] = {}

    def use(self, stamps: Sequence[Stamps]) -> None:
        """From now on these tell the stages of replayed steps, by lane."""
        self._stamps = stamps
        self._arm(bool(self._listeners))

    def subscribe(self, listener: Callable[[StepTimes], None]) -> None:
        """Tell `listener` of every step from the next one on, in order, some steps later."""
        self._clock = self._clock or self._make_clock()
        self._listeners = (*self._listeners, listener)
        self._arm(True)

    def forget(self, listener: Callable[[StepTimes], None]) -> None:
        """Tell `listener` no more."""
        self._listeners = tuple(other for other in self._listeners if other != listener)
        self._arm(bool(self._listeners))

    def agreed(self, plan: StepPlan) -> None:
        """The ranks have agreed on the next step's plan."""
        self._agreed = time.monotonic()
        empty = not any(plan.rows) and not plan.work
        self._empty = self._empty + 1 if empty else 0
        if self._empty == self._pause:
            self._going.clear()
        elif not empty and not self._own(plan.rows):
            self._going -= {(plan.lane, path) for path in Path}
        if self._clock is not None:
            self._tell(self._clock)  # of the last steps before a pause

    @contextmanager
    def step(self, plan: StepPlan, rounds: tuple[Round, ...]) -> Iterator[None]:
        """Time what the current stream does for a step, if this rank has rows in `rounds`."""
        clock = self._clock
        own = [round_ for round_ in rounds if self._own(round_.counts)]
        if clock is None or not self._listeners or not own:
            yield
            return
        path = own[0].path
        rows = sum(
            self._own(round_.counts) * (self._sources if round_.path is Path.DECODE else 1)
            for round_ in own
        )
        key = plan.lane, path
        stamps = self._stamps[plan.lane] if self._stamps and path is Path.DECODE else None
        self._open = opened = _Open(
            plan, rounds, path, rows, self._agreed, key in self._going, clock.mark(), stamps, [], []
        )
        if stamps is not None:
            stamps.begin()
        self._going.add(key)
        try:
            yield
        finally:
            self._open = None
        told_by = None if opened.marks else stamps
        taken = None if told_by is None else told_by.take()
        self._ended.append((opened._replace(stamps=told_by), clock.mark(), taken))
        self._tell(clock)

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        """A stage of the exchange; not noted outside of a step that is timed."""
        if self._open is None or self._clock is None:
            return _NOT_NOTED
        return _Noted(stage, self._open.marks, self._clock)

    @contextmanager
    def beside(self, lane: int, stage: Stage) -> Iterator[None]:
        """Time what the current stream does outside of steps for `lane`'s next decode step."""
        clock = self._clock
        if clock is None or not self._listeners:
            yield
            return
        noted = _Beside(lane, stage, clock.mark())
        yield
        self._ended.append((noted, clock.mark(), None))

    def received(self, batch: RowBatch | MaskedBatch) -> None:
        """Count what each expert got; as `stage`, only in a step that is timed."""
        if self._open is not None:
            self._open.loads.append(expert_rows(batch, self._experts))

    def _own(self, counts: tuple[int, ...]) -> int:
        return sum(counts) if self._rank is None else counts[self._rank]

    def _tell(self, clock: Clock) -> None:
        while self._ended and clock.passed(self._ended[0][1]):
            opened, end, taken = self._ended.popleft()
            if isinstance(opened, _Beside):
                span = Span(opened.stage, clock.seconds(opened.start), clock.seconds(end))
                self._beside.setdefault(opened.lane, []).append(span)
                continue
            times = self._times(opened, end, taken, clock)
            for listener in self._listeners:
                listener(times)

    def _arm(self, on: bool) -> None:
        for stamps in self._stamps:
            stamps.arm(on)

    def _times(self, opened: _Open, end: Any, taken: Any, clock: Clock) -> StepTimes:
        begun = at = clock.seconds(opened.start)
        spans = []
        for stage, first, last in opened.marks:
            start, stop = clock.seconds(first), clock.seconds(last)
            spans += [Span(self._own_work, at, start), Span(stage, start, stop)]
            at = stop
        finished = clock.seconds(end)
        if opened.stamps is not None:
            for stage, since, until in opened.stamps.spent(taken):
                # the two clocks are set by one moment, a few microseconds apart
                start, stop = (min(max(at, begun + s), finished) for s in (since, until))
                spans += [Span(self._own_work, at, start), Span(stage, start, stop)]
                at = stop
        if spans:
            spans.append(Span(self._own_work, at, finished))
        key = opened.plan.lane, opened.path
        before = self._starts.get(key)
        self._starts[key] = begun
        return StepTimes(
            opened.plan,
            opened.rounds,
            opened.path,
            opened.rows,
            opened.agreed,
            begun,
            finished,
            begun - before if opened.follows and before is not None else None,
            tuple(spans),
            torch.stack(opened.loads).cpu() if opened.loads else None,
            beside=tuple(self._beside.pop(key[0], ())) if opened.path is Path.DECODE else (),
            replayed=not opened.marks,
        )


def expert_rows(batch: RowBatch | MaskedBatch, experts: int) -> torch.Tensor:
    """Rows that each of an F rank's experts has in a batch: [experts] int64, on its device."""
    if isinstance(batch, MaskedBatch):
        return batch.counts.to(torch.int64)
    places = batch.expert_ids.flatten().to(torch.int64) + 1  # -1, no expert, counts at place 0
    counts = places.new_zeros(experts + 1)
    return counts.scatter_add_(0, places, torch.ones_like(places))[1:]
