"""Stages of a step: marks become spans without gaps, in the order and the time they happened."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.dispatch.step_plan import Caps, Path, StepKind, StepPlan
from sglang_afd.dispatch.transport import MaskedBatch, RowBatch
from sglang_afd.observe.stages import (
    Span,
    Spent,
    Stage,
    StepTimer,
    StepTimes,
    expert_rows,
)

pytestmark = pytest.mark.unit

CAPS = Caps(4, 16)


class FakeClock:
    """Its marks are moments of `now`; those after `done` have not passed yet, as on a device."""

    def __init__(self) -> None:
        self.now = 100.0
        self.done = math.inf

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return mark <= self.done

    def seconds(self, mark: float) -> float:
        return mark


def plan(
    step: int, *rows: int, lane: int = 0, work: int = 0, kind: StepKind = StepKind.DECODE
) -> StepPlan:
    kinds = tuple(kind if count else StepKind.IDLE for count in rows)
    return StepPlan(step, kinds, rows, CAPS, lane, work)


class Rank:
    """A timer of world rank 0 of 2, and what it told."""

    def __init__(self, rank: int | None = 0, pause: int = 1) -> None:
        self.clock = FakeClock()
        self.told: list[StepTimes] = []
        self.timer = StepTimer(
            Stage.ATTENTION, lambda: self.clock, rank=rank, experts=3, pause=pause
        )
        self.timer.subscribe(self.told.append)

    def run(self, agreed: StepPlan, seconds: float = 1.0) -> None:
        """A step with one exchange, of three equal parts."""
        self.timer.agreed(agreed)
        with self.timer.step(agreed, agreed.rounds):
            self.clock.now += seconds / 3
            with self.timer.stage(Stage.DISPATCH):
                self.clock.now += seconds / 3
            with self.timer.stage(Stage.COMBINE):
                self.clock.now += seconds / 3


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)), max_size=5))
def test_spans_have_no_gaps(exchanges: list[tuple[float, float, float]]) -> None:
    rank = Rank()
    agreed = plan(0, 2, 0)
    with rank.timer.step(agreed, agreed.rounds):
        for own, dispatch, combine in exchanges:
            rank.clock.now += own
            with rank.timer.stage(Stage.DISPATCH):
                rank.clock.now += dispatch
            with rank.timer.stage(Stage.COMBINE):
                rank.clock.now += combine
        rank.clock.now += 1
    [times] = rank.told
    assert times.end - times.start == pytest.approx(sum(map(sum, exchanges)) + 1)
    assert times.exchanging() == pytest.approx(sum(d + c for _, d, c in exchanges))
    ends = [times.start, *(span.end for span in times.spans)]
    assert [span.start for span in times.spans] == ends[:-1]
    assert ends[-1] == (times.end if exchanges else times.start)
    assert len(times.spans) == (4 * len(exchanges) + 1 if exchanges else 0)


def test_a_device_tells_later_and_in_order() -> None:
    rank = Rank()
    rank.clock.done = 100.5
    rank.run(plan(0, 1, 0))
    rank.run(plan(1, 1, 0))
    assert not rank.told
    rank.clock.done = 101.5
    rank.timer.agreed(plan(2, 0, 0))
    assert [times.plan.step_id for times in rank.told] == [0]
    rank.clock.done = math.inf
    rank.timer.agreed(plan(3, 0, 0))
    assert [times.plan.step_id for times in rank.told] == [0, 1]


@pytest.mark.parametrize(
    ("between", "known"),
    [
        ([], True),
        ([plan(1, 0, 0)], False),  # nobody had anything
        ([plan(1, 0, 3)], False),  # this rank had nothing
        ([plan(1, 0, 3, lane=1)], True),  # in another lane
        ([plan(1, 0, 0, lane=1, work=1)], True),
        ([plan(1, 0, 0, lane=1, work=0)], False),
    ],
)
def test_an_interval_has_no_pause_in_it(between: list[StepPlan], known: bool) -> None:
    rank = Rank()
    rank.run(plan(0, 1, 0))
    for agreed in between:
        rank.timer.agreed(agreed)
    rank.clock.now += 0.5
    rank.run(plan(2, 1, 0))
    first, second = rank.told
    assert first.interval is None
    assert second.interval == (pytest.approx(1.5) if known else None)


def test_prefills_do_not_count_as_decodes() -> None:
    rank = Rank()
    rank.run(plan(0, 1, 0))
    rank.run(plan(1, 1, 0, kind=StepKind.EXTEND))
    rank.run(plan(2, 1, 0))
    assert [times.interval for times in rank.told] == [None, None, pytest.approx(2.0)]


def test_steps_without_rows_are_not_told() -> None:
    rank, ffn = Rank(), Rank(rank=None)
    for each in (rank, ffn):
        each.run(plan(0, 0, 3))
    assert not rank.told
    assert [times.rows for times in ffn.told] == [3]


def test_nobody_listens_nothing_is_kept() -> None:
    rank = Rank()
    rank.timer.forget(rank.told.append)
    rank.run(plan(0, 1, 0))
    assert not rank.told
    with rank.timer.stage(Stage.RECEIVE):
        pass  # outside of a step


def test_a_prefill_beside_decodes_is_one() -> None:
    """Every rank takes part in decode rounds, also without rows there."""
    rank = Rank()
    mixed = StepPlan(0, (StepKind.EXTEND, StepKind.DECODE), (5, 1), CAPS)
    rank.run(mixed)
    [times] = rank.told
    assert (times.path, times.rows, len(times.rounds)) == (Path.BULK, 5, 2)


def test_own_rows_of_all_slices() -> None:
    rank = Rank()
    rank.run(plan(0, 9, 4))
    [times] = rank.told
    assert (times.rows, len(times.rounds)) == (9, 3)


def batches() -> list[tuple[Any, list[int]]]:
    ids = torch.tensor([[0, 2], [2, -1], [-1, -1]], dtype=torch.int32)
    rows = RowBatch(torch.zeros(3, 4), ids, torch.ones(3, 2))
    counts = torch.tensor([5, 0, 1], dtype=torch.int32)
    return [(rows, [1, 0, 2]), (MaskedBatch(torch.zeros(3, 8, 4), None, counts, 2), [5, 0, 1])]


@pytest.mark.parametrize(("batch", "rows"), batches(), ids=["rows", "masked"])
def test_what_each_expert_got(batch: RowBatch | MaskedBatch, rows: list[int]) -> None:
    assert expert_rows(batch, 3).tolist() == rows
    ffn = Rank(rank=None)
    agreed = plan(0, 1, 0)
    with ffn.timer.step(agreed, agreed.rounds):
        ffn.timer.received(batch)
        ffn.timer.received(batch)
    assert ffn.told[0].loads is not None and ffn.told[0].loads.tolist() == [rows, rows]


class FakeStamps:
    """Stamps of a step that tell what they are told to, and note what is asked of them."""

    def __init__(self, spent: list[Spent]) -> None:
        self.told, self.asked = spent, []  # type: tuple[list[Spent], list[str]]
        self.on = False

    def arm(self, on: bool) -> None:
        self.on = on

    def begin(self) -> None:
        self.asked.append("begin")

    def take(self) -> str:
        self.asked.append("take")
        return "taken"

    def spent(self, taken: str) -> list[Spent]:
        assert taken == "taken"
        return self.told


def replay(rank: Rank, agreed: StepPlan, seconds: float = 1.0) -> StepTimes:
    with rank.timer.step(agreed, agreed.rounds):
        rank.clock.now += seconds
    return rank.told[-1]


def test_stamps_tell_the_stages_of_a_replayed_step() -> None:
    rank = Rank()
    lanes = [FakeStamps([]), FakeStamps([(Stage.DISPATCH, 0.25, 0.5), (Stage.COMBINE, 0.5, 0.75)])]
    rank.timer.use(lanes)
    times = replay(rank, plan(0, 1, 0, lane=1))
    assert lanes[0].asked == [] and lanes[1].asked == ["begin", "take"]
    at = times.start
    assert times.spans == (
        Span(Stage.ATTENTION, at, at + 0.25),
        Span(Stage.DISPATCH, at + 0.25, at + 0.5),
        Span(Stage.ATTENTION, at + 0.5, at + 0.5),
        Span(Stage.COMBINE, at + 0.5, at + 0.75),
        Span(Stage.ATTENTION, at + 0.75, times.end),
    )
    assert times.replayed and times.loads is None
    assert not replay(rank, plan(1, 1, 0)).spans, "these stamps tell nothing"


def test_stamps_stay_within_the_step() -> None:
    """Two clocks: what one of them says may lie a little outside of what the other does."""
    rank = Rank()
    rank.timer.use([FakeStamps([(Stage.DISPATCH, -0.5, 0.5), (Stage.COMBINE, 0.4, 1.5)])])
    times = replay(rank, plan(0, 1, 0))
    ends = [times.start, *(span.end for span in times.spans)]
    assert [span.start for span in times.spans] == ends[:-1] and ends[-1] == times.end
    assert ends == sorted(ends)


def test_marks_count_more_than_stamps() -> None:
    """An eager decode step has both; prefills have no stamps."""
    rank = Rank()
    stamps = FakeStamps([(Stage.DISPATCH, 0.0, 1.0)])
    rank.timer.use([stamps])
    rank.run(plan(0, 1, 0))
    rank.run(plan(1, 9, 0, kind=StepKind.EXTEND))
    assert stamps.asked == ["begin"]
    assert all(len(times.spans) == 5 and not times.replayed for times in rank.told)


def test_stamps_are_armed_while_somebody_listens() -> None:
    rank = Rank()
    stamps = FakeStamps([])
    rank.timer.use([stamps])
    assert stamps.on
    more: list[StepTimes] = []
    rank.timer.subscribe(more.append)
    rank.timer.forget(rank.told.append)
    assert stamps.on
    rank.timer.forget(more.append)
    assert not stamps.on
    rank.timer.subscribe(more.append)
    assert stamps.on


@pytest.mark.parametrize(("empty", "known"), [(0, True), (1, True), (2, False), (3, False)])
def test_with_a_draft_one_empty_plan_is_no_pause(empty: int, known: bool) -> None:
    rank = Rank(pause=2)
    rank.run(plan(0, 1, 0))
    for _ in range(empty):
        rank.timer.agreed(plan(1, 0, 0))
    rank.run(plan(2, 1, 0))
    assert (rank.told[1].interval is not None) is known


def test_what_is_beside_steps_is_told_with_the_lanes_next_decode_step() -> None:
    rank = Rank()

    def beside(lane: int, stage: Stage, seconds: float) -> None:
        with rank.timer.beside(lane, stage):
            rank.clock.now += seconds

    beside(0, Stage.DRAFT, 2.0)
    beside(1, Stage.DRAFT, 3.0)
    rank.run(plan(0, 2, 0, kind=StepKind.EXTEND))  # a prefill is no verify step
    rank.run(plan(1, 2, 0))
    beside(0, Stage.SAMPLE, 0.5)
    beside(0, Stage.DRAFT_EXTEND, 1.0)
    beside(0, Stage.DRAFT, 4.0)
    rank.run(plan(2, 2, 0, lane=1))
    rank.run(plan(3, 2, 0))
    rank.run(plan(4, 2, 0))
    found = [[(s.stage, s.end - s.start) for s in times.beside] for times in rank.told]
    assert found == [
        [],
        [(Stage.DRAFT, 2.0)],
        [(Stage.DRAFT, 3.0)],
        [(Stage.SAMPLE, 0.5), (Stage.DRAFT_EXTEND, 1.0), (Stage.DRAFT, 4.0)],
        [],
    ]
    steps = [times for times in rank.told if times.beside]
    assert all(times.beside[-1].end <= times.start for times in steps), "they are no part of steps"


def test_nothing_is_timed_beside_steps_for_nobody() -> None:
    rank = Rank()
    rank.timer.forget(rank.told.append)
    with rank.timer.beside(0, Stage.DRAFT):
        rank.clock.now += 1
    assert not rank.timer._ended
