"""The order in which lanes are launched and read, and how a rank's requests move between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_afd.upstream import lane_loop
from tests.support.fake_scheduler import Batch, Event, FakeLoop, FakeScheduler, Req, cycles

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def no_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lane_loop.quarantine, "give_back_ended", lambda: None)
    yield
    Batch.room = staticmethod(lambda batch: True)


def two() -> tuple[FakeScheduler, FakeLoop]:
    scheduler = FakeScheduler(2)
    return scheduler, FakeLoop(scheduler)


def test_a_lanes_next_step_comes_after_the_other_lanes_turn() -> None:
    """Prefill, both lanes in turn; each step is launched before the lane's last one is read."""
    scheduler, loop = two()
    scheduler.waiting = [Req("a"), Req("b"), Req("c")]
    assert cycles(scheduler, loop, 1) == [("run", 2, "abc")]
    assert cycles(scheduler, loop, 1) == [("read", 2, "abc"), ("run", 0, "ac"), ("run", 1, "b")]
    again = [("run", 0, "ac"), ("read", 0, "ac"), ("run", 1, "b"), ("read", 1, "b")]
    assert cycles(scheduler, loop, 3) == again * 3
    assert (len(loop.lanes[0].results), len(loop.lanes[1].results)) == (1, 1)


def test_prefills_go_on_beside_decode_and_join_the_smaller_lane() -> None:
    scheduler, loop = two()
    scheduler.waiting = [Req("a"), Req("b"), Req("c")]
    cycles(scheduler, loop, 2)
    scheduler.waiting = [Req("d")]
    ran = [entry for entry in cycles(scheduler, loop, 2) if entry[0] == "run"]
    assert ran[:3] == [("run", 2, "d"), ("run", 0, "ac"), ("run", 1, "b")]
    assert ran[3:] == [("run", 0, "ac"), ("run", 1, "bd")]


def test_lanes_go_on_while_an_extend_has_not_ended() -> None:
    """Nobody waits for it, and it is neither read nor joined by others' turn."""
    scheduler, loop = two()
    scheduler.waiting = [Req("a"), Req("b")]
    cycles(scheduler, loop, 2)
    scheduler.waiting, scheduler.unended = [Req("c")], {2}
    log = cycles(scheduler, loop, 4)
    assert ("read", 2, "c") not in log and log.count(("run", 0, "a")) == 4
    scheduler.waiting = [Req("d")]
    assert ("run", 2, "d") not in cycles(scheduler, loop, 2), "one extend at a time"
    scheduler.unended = set()
    log = cycles(scheduler, loop, 1)
    assert log[:2] == [("read", 2, "c"), ("run", 2, "d")] and ("run", 0, "ac") in log


def test_the_ranks_of_a_dp_rank_wait_for_an_extend() -> None:
    """Else one would see it end a cycle before another, and they would run different batches."""
    scheduler = FakeScheduler(2, attention_tp=2)
    loop = FakeLoop(scheduler)
    scheduler.waiting, scheduler.unended = [Req("a")], {2}
    assert cycles(scheduler, loop, 2)[:2] == [("run", 2, "a"), ("read", 2, "a")]


def test_an_extend_under_way_is_not_lost_to_that_of_another_rank() -> None:
    """A rank that waits for its own has no part in the other's blocks; an F rank serves both."""
    scheduler, loop = two()
    scheduler.waiting, scheduler.unended, scheduler.work_elsewhere = [Req("a")], {2}, 0b100
    log = cycles(scheduler, loop, 4)
    assert [entry for entry in log if entry[0] == "run"] == [("run", 2, "a")]
    assert scheduler.forward_ct == 4, "all ranks count alike"
    scheduler.unended, scheduler.work_elsewhere = set(), 0
    assert ("run", 0, "a") in cycles(scheduler, loop, 1)
    ffn = FakeScheduler(2)
    ffn.context.rank = 1
    loop, ffn.unended, ffn.work_elsewhere = FakeLoop(ffn), {2}, 0b100
    assert cycles(ffn, loop, 3) == [("run", 2, "")] * 3
    assert not loop.drained()
    ffn.unended, ffn.work_elsewhere = set(), 0
    assert cycles(ffn, loop, 2) == [("read", 2, "")] * 3 + [("idle",)]


def test_tables_are_written_after_the_lanes_own_last_step_has_read_them() -> None:
    """Not right after the launch: that would hold up the next lane's."""
    scheduler, loop = two()
    scheduler.waiting = [Req("a"), Req("b")]
    cycles(scheduler, loop, 3)
    places = [i for i, entry in enumerate(scheduler.log) if entry[0] in ("run", "written after")]
    turns = [("written after", 0), ("run", 0, "a"), ("written after", 1), ("run", 1, "b")]
    assert [scheduler.log[i] for i in places[-4:]] == turns
    early = Event(scheduler)
    early.lane = 7
    scheduler.runner.shared_read_done_event = early
    cycles(scheduler, loop, 2)
    assert ("written after", 7) in scheduler.log, "the step says when it has read them"
    assert scheduler.runner.shared_read_done_event is None


@pytest.mark.parametrize("delayed", [None, "later"])
def test_a_step_that_samples_later_ends_with_its_sampling(delayed: str | None) -> None:
    """Until then what its requests freed is held: the sampling still writes for them."""
    scheduler, loop = two()
    scheduler.waiting, scheduler.delayed = [Req("a"), Req("b")], delayed
    pending: list[int] = []
    read = scheduler.process_batch_result

    def reading(batch: Any, result: Any) -> None:
        pending.append(len(scheduler.context.steps.pending()))
        read(batch, result)

    scheduler.process_batch_result = reading  # type: ignore[method-assign]
    cycles(scheduler, loop, 3)
    order = [entry[0] for entry in scheduler.log if entry[0] in ("sample", "recorded")]
    pair = ["sample", "recorded"] if delayed else ["recorded", "sample"]
    assert order == pair * (len(order) // 2)
    assert pending[1:] == [int(bool(delayed))] * len(pending[1:]), "besides the step just read"
    assert not scheduler.context.steps.pending()


def test_a_lane_has_its_own_parts_in_its_turn_alone() -> None:
    """The fake scheduler checks that each step runs on its lane's."""
    scheduler, loop = two()
    scheduler.waiting = [Req("a"), Req("b")]
    cycles(scheduler, loop, 3)
    assert scheduler.runner.attn_backend == "backend"
    with pytest.raises(ZeroDivisionError), loop.lanes[1].enter(scheduler):
        assert scheduler.runner.attn_backend == 1
        raise ZeroDivisionError
    assert scheduler.runner.attn_backend == "backend"


def test_an_extend_over_a_prefix_runs_after_the_other_lanes_steps() -> None:
    scheduler, loop = two()
    scheduler.waiting = [Req("a"), Req("b")]
    cycles(scheduler, loop, 2)
    scheduler.unended, scheduler.waiting = {0, 1}, [Req("c", prefix_len=0)]
    assert not [entry for entry in cycles(scheduler, loop, 1) if entry[0] == "wait"]
    scheduler.waiting = [Req("d", prefix_len=5), Req("e")]
    log = cycles(scheduler, loop, 1)
    place = log.index(("run", 2, "de"))
    stream = scheduler.forward_stream
    assert set(log[:place]) >= {("wait", 0, stream), ("wait", 1, stream)}
    assert ("wait", 2, stream) not in log, "its own lane's steps are before it anyway"


def test_ended_requests_leave_their_lane_and_the_rank_comes_to_rest() -> None:
    scheduler, loop = two()
    scheduler.waiting = [Req("a", 3), Req("b", 1)]
    log = cycles(scheduler, loop, 8)
    assert [entry for entry in log if entry[0] == "run"] == [
        *[("run", 2, "ab"), ("run", 0, "a"), ("run", 0, "a"), ("run", 0, "a")]
    ], "b ended with its prefill; a ran one step more than it needed"
    assert log[-1] == ("idle",) and loop.drained() and loop.everyone.is_empty()


def test_a_lane_with_requests_elsewhere_is_joined_idle() -> None:
    scheduler, loop = two()
    scheduler.work_elsewhere = 0b010
    assert cycles(scheduler, loop, 2) == [("run", 1, ""), ("run", 1, ""), ("read", 1, "")]
    scheduler.work_elsewhere = 0
    assert cycles(scheduler, loop, 2) == [("read", 1, ""), ("idle",)]
    assert [lane.steps for lane in loop.lanes] == [0, 0]


def test_each_lane_keeps_the_tensors_of_its_own_two_last_steps() -> None:
    """One ring for all would let go of a lane's tensors while its step is under way."""
    scheduler, loop = two()
    scheduler.waiting = [Req("a"), Req("b")]
    cycles(scheduler, loop, 5)
    kept = []
    for lane in (*loop.lanes, loop.prefill):
        with lane.enter(scheduler):
            assert scheduler.result_queue is lane.results
            kept.append(scheduler.batch_record_buf)
    assert kept == [["a", "a"], ["b", "b"], [None, "ab"]]
    assert not scheduler.result_queue


def test_a_pause_runs_nothing_and_settling_reads_everything() -> None:
    scheduler, loop = two()
    scheduler.waiting = [Req("a"), Req("b")]
    cycles(scheduler, loop, 2)
    scheduler.waiting = [Req("c")]
    cycles(scheduler, loop, 1)
    scheduler._engine_paused = True
    assert cycles(scheduler, loop, 2) == [("paused",)] * 2
    loop.settle()
    assert [entry for entry in scheduler.log if entry[0] == "read"] == [
        *[("read", 0, "a"), ("read", 1, "b"), ("read", 2, "c")]
    ]
    assert loop.drained() and sorted(r.name for r in loop.everyone.reqs) == ["a", "b", "c"]
    loop.everyone.reqs = []
    assert loop.everyone.is_empty()


def test_everyones_indices_reach_the_right_lane() -> None:
    """SGLang's preemption releases and drops requests by their place among all."""
    scheduler, loop = two()
    scheduler.waiting = [Req(name) for name in "abcde"]
    cycles(scheduler, loop, 2)
    everyone = loop.everyone
    assert "".join(req.name for req in everyone.reqs) == "acebd"
    everyone.release_req(3, 4)
    assert [(r.name, n) for r, n in loop.lanes[1].running.released] == [("b", 4)]
    everyone.filter_batch(keep_indices=[0, 2, 4])
    assert [scheduler.names(lane.running) for lane in loop.lanes] == ["ae", "d"]
    with pytest.raises(IndexError):
        everyone.release_req(3, 0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of requests whose KV was released, in order."""
    found: list[str] = []
    from sglang.srt.managers import schedule_batch

    def release(*, reqs: list[Req], **kwargs: Any) -> None:
        found.extend(req.name for req in reqs)

    monkeypatch.setattr(schedule_batch, "retract_all", release)
    return found


def with_outputs(**lengths: int) -> tuple[FakeScheduler, FakeLoop]:
    """Running requests with that many tokens each."""
    scheduler, loop = two()
    scheduler.waiting = [Req(name) for name in lengths]
    cycles(scheduler, loop, 2)
    for req in loop.everyone.reqs:
        req.output_ids = [0] * lengths[req.name]
    return scheduler, loop


def test_memory_is_taken_from_whoever_loses_least(taken: list[str]) -> None:
    _, loop = with_outputs(a=9, b=1, c=8, d=2)
    short = loop.lanes[0].running
    Batch.room = staticmethod(lambda batch: len(loop.everyone.reqs) <= 2)
    assert [req.name for req in loop.make_room(short)] == taken == ["b", "d"]
    assert [len(lane.running.reqs) for lane in loop.lanes] == [2, 0]


def test_results_are_read_first_for_they_may_end_requests(taken: list[str]) -> None:
    """And a result read later would be that of a request which begins anew."""
    _, loop = with_outputs(a=5, b=99)
    Batch.room = staticmethod(lambda batch: len(loop.everyone.reqs) <= 1)
    assert loop.make_room(loop.lanes[0].running) == [] and taken == []
    assert loop.drained() and [req.name for req in loop.everyone.reqs] == ["a"]


def test_a_prompt_in_chunks_goes_before_those_that_decode(taken: list[str]) -> None:
    scheduler, loop = with_outputs(a=9, b=8)
    scheduler.chunked_req = Req("x")
    Batch.room = staticmethod(lambda batch: scheduler.chunked_req is None)
    assert [req.name for req in loop.make_room(loop.lanes[1].running)] == taken == ["x"]


def test_one_request_is_always_left(taken: list[str]) -> None:
    _, loop = with_outputs(a=9, b=1, c=8)
    Batch.room = staticmethod(lambda batch: batch.is_empty())
    loop.make_room(loop.lanes[0].running)
    assert taken == ["b", "c"] and [req.name for req in loop.everyone.reqs] == ["a"]
