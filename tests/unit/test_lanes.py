"""What may be used again while steps of several lanes are under way, with events made by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.lanes import Quarantine, StepsInFlight, spread

pytestmark = pytest.mark.unit


class Step:
    """A launched step that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = False
        self.waited = 0

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True

    def wait(self, stream: Any = None) -> None:
        self.waited += 1


@pytest.fixture
def steps() -> StepsInFlight:
    return StepsInFlight()


def test_only_the_last_step_of_a_lane_counts(steps: StepsInFlight) -> None:
    first, second, other = Step(), Step(), Step()
    steps.launched(0, first)
    steps.launched(1, other)
    steps.launched(0, second)
    assert set(steps.pending()) == {second, other}
    assert steps.pending(but=0) == (other,)
    second.ended = True
    assert steps.pending() == (other,)


def test_what_is_freed_with_nothing_under_way_is_free_at_once(steps: StepsInFlight) -> None:
    back: list[str] = []
    quarantine = Quarantine(steps)
    quarantine.free(3, lambda: back.append("a"))
    assert back == ["a"] and quarantine.size == 0


def test_what_is_freed_waits_for_the_steps_of_all_lanes_launched_before(
    steps: StepsInFlight,
) -> None:
    back: list[str] = []
    quarantine, (zero, one) = Quarantine(steps), (Step(), Step())
    steps.launched(0, zero)
    steps.launched(1, one)
    quarantine.free(3, lambda: back.append("a"))
    assert (back, quarantine.size) == ([], 3)
    zero.ended = True
    quarantine.give_back_ended()
    assert back == [], "lane 1 may still write there"
    steps.launched(0, Step())  # launched after the free: it was told of none of it
    one.ended = True
    quarantine.give_back_ended()
    assert (back, quarantine.size) == (["a"], 0)


def test_waiting_returns_everything_after_its_steps(steps: StepsInFlight) -> None:
    back: list[str] = []
    quarantine, step = Quarantine(steps), Step()
    steps.launched(0, step)
    quarantine.free(1, lambda: back.append(f"after {step.waited} waits"))
    quarantine.free(2, lambda: back.append(f"after {step.waited} waits"))
    assert quarantine.size == 3
    quarantine.give_back_all()
    assert back == ["after 1 waits", "after 2 waits"] and quarantine.size == 0


def test_a_cleared_pool_is_given_nothing_back(steps: StepsInFlight) -> None:
    back: list[str] = []
    quarantine = Quarantine(steps)
    steps.launched(0, Step())
    quarantine.free(1, lambda: back.append("a"))
    quarantine.clear()
    quarantine.give_back_all()
    assert back == [] and quarantine.size == 0


@given(
    st.lists(st.tuples(st.sampled_from(["launch", "free", "end"]), st.integers(0, 3)), max_size=60)
)
def test_nothing_is_given_back_early_or_lost(events: list[tuple[str, int]]) -> None:
    """Any order of launches, frees and ends, each lane's steps ending in order."""
    steps, back = StepsInFlight(), Counter[int]()
    quarantine = Quarantine(steps)
    launched: list[list[Step]] = [[], [], [], []]
    waits_for: dict[int, list[Step]] = {}
    for number, (what, lane) in enumerate(events):
        running = [step for step in launched[lane] if not step.ended]
        if what == "launch":
            launched[lane].append(Step())
            steps.launched(lane, launched[lane][-1])
        elif what == "end" and running:
            running[0].ended = True
        elif what == "free":
            waits_for[number] = [s for lane_ in launched for s in lane_ if not s.ended]
            quarantine.free(1, lambda number=number: back.update([number]))
        quarantine.give_back_ended()
        for freed in back:
            assert all(step.ended for step in waits_for[freed])
    assert quarantine.size == len(waits_for) - len(back)
    quarantine.give_back_all()
    assert back == Counter(dict.fromkeys(waits_for, 1))


@given(st.integers(0, 40), st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_requests_go_where_there_are_fewest(joining: int, sizes: list[int]) -> None:
    chosen = spread(joining, sizes)
    after = [size + chosen.count(lane) for lane, size in enumerate(sizes)]
    assert len(chosen) == joining and sum(after) == sum(sizes) + joining
    got_some = {after[lane] for lane in chosen}
    assert not got_some or max(got_some) <= min(after) + 1
