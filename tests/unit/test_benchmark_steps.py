"""Which decode steps count, and when a measurement does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.steps import Asked, Judged, judge, steps_of
from sglang_afd.upstream.decode_log import DecodeLine

pytestmark = pytest.mark.unit

ASKED = Asked(ranks=2, lanes=1, batch=4, context=10, graphs=True)


def lines(
    count: int = 30,
    *,
    change: Callable[[DecodeLine], Any] = lambda line: line,
    asked: Asked = ASKED,
) -> list[DecodeLine]:
    """Steps of 20 ms at the full batch on every rank; what `change` makes None is left out."""
    made = [
        DecodeLine(rank, number, asked.batch, asked.batch * asked.context + number, True, 20.0, 0)
        for number in range(100, 100 + count)
        for rank in range(asked.ranks)
    ]
    return [changed for line in made if (changed := change(line)) is not None]


def judged(found: list[DecodeLine], asked: Asked = ASKED) -> Judged:
    return judge(steps_of(found, asked), warm_up=5, count=15, asked=asked)


def at(*iterations: int, rank: int | None = None, **fields: Any) -> Callable[[DecodeLine], Any]:
    """Change the lines of these steps, of one rank or of all; ``gone=True`` removes them."""

    def change(line: DecodeLine) -> DecodeLine | None:
        if line.iteration not in iterations or (rank is not None and line.rank != rank):
            return line
        return None if fields.get("gone") else line._replace(**fields)

    return change


def test_steady_steps_count() -> None:
    found = judged(lines())
    assert found.problems == []
    assert (found.ms, found.spread) == (20.0, 0.0)
    assert [step.iteration for step in found.steps] == list(range(105, 120))
    assert all(step.kept and step.requests == [4, 4] for step in found.steps)


def test_a_steps_time_is_the_ranks_mean() -> None:
    found = judged(lines(change=lambda line: line._replace(ms=19.0 + 2 * line.rank)))
    assert found.ms == 20.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (at(106, rank=1, requests=3), "requests [4, 3]"),
        (at(106, rank=0, requests=5), "requests [5, 4]"),
        (at(106, rank=1, gone=True), "requests [4]"),
        (at(106, rank=1, tokens=39), "39 tokens"),
        (at(106, rank=1, graph=False), "graphs"),
    ],
    ids=["one short", "one too many", "one rank idle", "context too short", "no graph"],
)
def test_a_step_that_is_not_the_asked_one_is_not_kept(
    change: Callable[[DecodeLine], Any], problem: str
) -> None:
    found = judged(lines(change=change))
    wrong = next(step for step in found.steps if step.iteration == 106)
    assert problem in wrong.problem and not wrong.kept
    assert found.problems == [], "14 of 15 are enough"


def test_a_step_behind_a_prefill_is_not_kept() -> None:
    """The prefill is inside its time: pass 106 was none of decode."""
    found = judged(lines(change=at(106, gone=True)))
    behind = next(step for step in found.steps if step.iteration == 107)
    assert behind.problem == "another pass came before it"
    assert found.problems == []


def test_a_step_behind_a_smaller_batch_is_not_kept() -> None:
    found = judged(lines(change=at(106, requests=3)))
    assert [s.iteration for s in found.steps if not s.kept] == [106, 107]


@pytest.mark.parametrize(("slow", "counts"), [(3, True), (4, False)])
def test_three_of_fifteen_may_be_left_out(slow: int, counts: bool) -> None:
    found = judged(lines(change=at(*range(106, 106 + slow), ms=30.0)))
    assert found.ms == 20.0
    assert (found.problems == []) == counts
    if not counts:
        assert found.spread == pytest.approx(0.5)
        assert "spread by 50.0%" in found.problems[0]


@pytest.mark.parametrize(("other", "counts"), [(20.5, True), (20.7, False)])
def test_the_spread_may_be_three_percent(other: float, counts: bool) -> None:
    found = judged(lines(change=at(*range(100, 112), ms=other)))
    assert (found.problems == []) == counts


def test_too_few_full_steps() -> None:
    found = judged(lines(change=at(*range(110, 114), rank=0, requests=3)))
    assert found.ms == 20.0
    assert "10 of 15 steps kept, at least 12 are needed: requests [3, 4]" in found.problems[0]


def test_answers_that_end_too_early() -> None:
    found = judged(lines(12))
    assert "only 7 of 15 steps came before the batch ended" in found.problems


@pytest.mark.parametrize("found", [[], lines(change=lambda line: line._replace(requests=3))])
def test_a_batch_that_never_was_full(found: list[DecodeLine]) -> None:
    result = judged(found)
    assert (result.ms, result.steps) == (None, [])
    assert "the batch was never full" in result.problems[0]


def test_graphs_need_not_be_used_where_they_are_not_asked_for() -> None:
    eager = ASKED._replace(graphs=False)
    assert judged(lines(change=lambda line: line._replace(graph=False)), eager).problems == []


def test_lanes_make_a_step_together() -> None:
    two = ASKED._replace(lanes=2)
    found = judged(lines(60, asked=two), two)
    assert found.problems == []
    assert found.ms == 20.0, "a line of half of the requests tells twice the time that passed"
    assert all(step.requests == [4, 4] for step in found.steps)
    assert [step.iteration for step in found.steps] == list(range(110, 140, 2))


def test_a_lane_that_misses_a_pass_breaks_the_step() -> None:
    two = ASKED._replace(lanes=2)
    found = judged(lines(60, asked=two, change=at(113, rank=1, requests=1)), two)
    assert found.problems == []
    kept = [step.iteration for step in found.steps if step.kept]
    assert 112 not in kept and 113 not in kept and 114 not in kept


def test_a_prefill_between_two_lanes_passes_is_in_no_step() -> None:
    two = ASKED._replace(lanes=2)
    found = judged(lines(60, asked=two, change=at(113, gone=True)), two)
    assert 112 not in [step.iteration for step in found.steps]
    behind = next(step for step in found.steps if step.iteration == 114)
    assert behind.problem == "another pass came before it" and not behind.kept


@pytest.mark.parametrize("late", [1, 2, 7])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_rank_that_decodes_while_another_prefills(late: int, lanes: int) -> None:
    """Its steps alone are not counted; then it is ahead by their tokens, which is no fault."""
    asked = ASKED._replace(lanes=lanes)

    def staggered(line: DecodeLine) -> DecodeLine | None:
        if line.rank == 0:
            return line._replace(tokens=line.tokens + 4 * late)
        return None if line.iteration < 100 + late else line

    found = judged(lines(60, asked=asked, change=staggered), asked)
    assert found.problems == []
    assert all(step.requests == [4, 4] and step.kept for step in found.steps)
    assert found.steps[0].iteration == 100 + late + 5 * lanes
    ahead = {step.tokens[0] - step.tokens[1] for step in found.steps}
    assert ahead == {4 * late}
