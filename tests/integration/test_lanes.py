"""Several lanes (``--afd-lanes``): the tokens of one lane, whatever joins, leaves or is lacking."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.layouts import (
    A1F1,
    A1T2F1,
    A2F1,
    A2F2,
    CAD,
    CAD_WIDER,
    CHUNK,
    RUNNING,
    Layout,
    families,
    lanes,
    on,
    small,
)
from tests.support.processes import wait_until
from tests.support.random_load import (
    MAY_END,
    answers_alone,
    arrivals,
    known_prompts,
    nothing_left,
    run,
    until_end,
)
from tests.support.reference import Expect, assert_equal, check
from tests.support.seeds import fresh_seed
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

TWO = lanes(small(A2F1), 2)
CAD_TWO = lanes(CAD, 2)
CAD_RANKS = lanes(CAD_WIDER[1], 2)
RECURRENT = TWO.of("qwen3.5")
THREE = lanes(small(A1F1), 3)
OTHERS = (
    *(lanes(small(A1F1), count) for count in (2, 4)),
    *(lanes(small(A2F1), 3), lanes(small(A2F2), 2), lanes(small(A1T2F1), 2)),
    *families(TWO),
)

TOKENS = 280  # of the tiny pool
_TINY = ("--max-total-tokens", str(TOKENS), "--schedule-conservativeness", "0.3")
TINY = replace(lanes(small(A2F1), 2, *_TINY), note="tiny-2lanes")
TINY_THREE = replace(lanes(small(A1F1), 3, *_TINY), note="tiny-3lanes")


def counts(world: World, what: str, rank: int = 0) -> list[int]:
    """``requests`` or ``steps`` of the lanes of a rank that takes requests."""
    states = world.get("/server_info").json()["internal_states"]
    told = {state["afd"]["rank"]: state["afd"]["lanes"] for state in states}
    leading = "model" if any(name.startswith("model") for name in told) else "attention"
    name = re.compile(rf"{leading} rank {rank}(\.0)? ")
    [shown] = [lanes for told_by, lanes in told.items() if name.match(told_by)]
    return [lane[what] for lane in shown]


def loads(world: World) -> tuple[int, int]:
    """Running and waiting requests of attention rank 0."""
    load = world.get("/v1/loads").json()["loads"][0]
    return load["num_running_reqs"], load["num_waiting_reqs"]


def retractions(world: World) -> int:
    """How often a rank has taken requests back for lack of memory."""
    return world.log.count("Retract requests")


@on(TWO, RECURRENT, CAD_TWO, full=(THREE, *(layout for layout in OTHERS if layout != RECURRENT)))
def test_tokens_are_those_of_one_lane(world: World, layout: Layout, expect: Expect) -> None:
    """Mixed lengths at different times; prompts in chunks, chunks in slices."""
    before = counts(world, "steps")
    check(world, expect, prompts(), 64)
    ran = [after - was for was, after in zip(before, counts(world, "steps"), strict=True)]
    assert min(ran) > 20, f"steps of each lane: {ran}"
    nothing_left(world)


@on(TWO, CAD_TWO, full=OTHERS)
def test_requests_are_spread_evenly(world: World, layout: Layout) -> None:
    """As many as a rank may run, on one rank: the lanes have equal shares, no more run at once."""
    asked = prompts([6] * (RUNNING + 2), seed=61)
    streams = [world.stream(prompt, 1500, routed_dp_rank=0) for prompt in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(next, streams[:RUNNING]))
        for stream in streams[RUNNING:]:
            pool.submit(next, stream, None)
        running = counts(world, "requests")
        assert wait_until(lambda: loads(world) == (RUNNING, 2), 10), loads(world)
        assert world.post("/abort_request", {"abort_all": True}).status_code == 200
    for stream in streams:
        stream.close()
    count = len(running)
    assert sorted(running) == sorted(RUNNING // count + (i < RUNNING % count) for i in range(count))
    nothing_left(world)


@on(TWO, CAD_TWO, full=OTHERS)
def test_one_request_leaves_the_other_lanes_empty(world: World, expect: Expect) -> None:
    before = counts(world, "steps")
    check(world, expect, prompts([30], seed=62), 40, routed_dp_rank=0)
    ran = [after - was for was, after in zip(before, counts(world, "steps"), strict=True)]
    assert sorted(ran)[:-1] == [0] * (len(ran) - 1) and max(ran) >= 39, ran


@on(TWO, CAD_RANKS)
def test_a_rank_left_idle(world: World, expect: Expect) -> None:
    """All requests on DP rank 1: rank 0 takes part in every lane's exchanges without a token."""
    answers = check(world, expect, prompts(), 24, routed_dp_rank=1)
    assert {answer.dp_rank for answer in answers} == {1}


@on(TWO, CAD_TWO, full=OTHERS)
def test_abort_in_every_lane(world: World, layout: Layout, expect: Expect) -> None:
    """Requests end by name or by hanging up, in chunks too; those beside them are right."""
    victims, others = prompts([20] * 4 + [1500], seed=63), prompts([30, 40], seed=64)
    kept = [world.stream(prompt, 64, routed_dp_rank=0) for prompt in others]
    for stream in kept:
        next(stream)
    doomed = [
        world.stream(prompt, 1500, routed_dp_rank=0, rid=f"doomed-{i}")
        for i, prompt in enumerate(victims)
    ]
    for stream in doomed[:4]:
        next(stream)
    with ThreadPoolExecutor(1) as pool:
        in_chunks = pool.submit(list, doomed[4])
        time.sleep(0.3)
        assert world.post("/abort_request", {"rid": "doomed-4"}).status_code == 200
        *_, last = in_chunks.result(20)
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    for rid, stream in list(enumerate(doomed))[:2]:
        assert world.post("/abort_request", {"rid": f"doomed-{rid}"}).status_code == 200
        *_, last = stream
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    for stream in doomed[2:4]:
        stream.close()
    for stream, prompt in zip(kept, others):
        *_, last = stream
        assert tuple(last["output_ids"]) == expect([prompt], 64)[0].tokens
    nothing_left(world)


@on(TWO, CAD_TWO, full=(THREE, *OTHERS))
def test_lanes_go_on_while_a_long_prompt_is_in_chunks(world: World, expect: Expect) -> None:
    """Decode is not held up until a prompt of many chunks on the same rank is done."""
    [decoding, long] = prompts([20, 1800], seed=65)
    stream = world.stream(decoding, 200, routed_dp_rank=0)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(check, world, expect, [long], 4, routed_dp_rank=0)
        tokens = sum(1 for _ in stream if not prefill.done())
        prefill.result(60)
    assert 1800 / CHUNK > 20 and tokens > 20, (
        f"{tokens} tokens in the time of {1800 // CHUNK} chunks"
    )
    nothing_left(world)


@on(full=(TWO,))
def test_pause_and_continue(world: World, expect: Expect) -> None:
    """In place and by taking everything back; requests of all lanes end right after it."""
    for mode in ("in_place", "retract"):
        asked = prompts([20, 30, 8, 12], seed=66)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(
                send, world, asked, 96, delays=[0.0] * 4, fields=lambda _: {"routed_dp_rank": 0}
            )
            assert wait_until(lambda: sum(counts(world, "requests")) == 4, 10)
            assert world.post("/pause_generation", {"mode": mode}).status_code == 200
            paused = counts(world, "steps")
            assert sum(counts(world, "requests")) == (4 if mode == "in_place" else 0)
            time.sleep(0.5)
            assert counts(world, "steps") == paused and not answers.done()
            assert world.post("/continue_generation", {}).status_code == 200
            assert_equal(answers.result(60), expect(asked, 96))
    nothing_left(world)


@on(TINY, full=(TINY_THREE,))
def test_too_little_memory_for_all(world: World, expect: Expect) -> None:
    """Requests are taken back and done again, from any lane; the last one of a lane is not lost."""
    asked = prompts([12, 10, 14], seed=68)
    expected = expect(asked, 120)
    assert all(until_end(answer.tokens) == answer.tokens for answer in expected)
    before = retractions(world)
    fields = {"routed_dp_rank": 0, "sampling_params": MAY_END}
    answers = send(world, asked, 120, delays=[0.0] * 3, fields=lambda _: dict(fields))
    assert_equal(answers, expected)
    assert retractions(world) > before, "memory was to be short"
    nothing_left(world)


@on(TINY)
def test_a_request_that_never_fits_ends_alone(world: World, expect: Expect) -> None:
    """It is refused or ends by itself with an error; the one beside it is right."""
    [small_one, large] = prompts([20, TOKENS - 20], seed=68)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(check, world, expect, [small_one], 60, routed_dp_rank=0)
        response = world.post(
            "/generate",
            {
                "input_ids": list(large),
                "sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
                "routed_dp_rank": 0,
            },
        )
        beside.result(60)
    if response.status_code == 200:
        assert tuple(response.json()["output_ids"])  # cut to what the pool has
    check(world, expect, [small_one], 8, routed_dp_rank=0)
    nothing_left(world)


MANY = 500


def random_run(world: World, expect: Expect, seed: int, count: int) -> None:
    """Every request's tokens are those of its solo run, and every lane got its turns."""
    known = known_prompts(seed, min(10, count // 6))
    alone = answers_alone(world, expect, known, constrained=False)
    before, taken_back = counts(world, "steps"), retractions(world)
    wrong = run(world, arrivals(known, seed, count), alone)
    assert not wrong, f"seed {seed}: {len(wrong)} of {count} differ, first {wrong[0]}"
    ran = [after - was for was, after in zip(before, counts(world, "steps"), strict=True)]
    assert min(ran) > 0, f"seed {seed}: steps of each lane of rank 0: {ran}"
    if count >= MANY:
        assert retractions(world) > taken_back, f"seed {seed}: memory was to be short"
        assert min(ran) > max(ran) / 3, f"seed {seed}: steps of each lane of rank 0: {ran}"
    nothing_left(world)


@on(TINY)
def test_random_requests(world: World, expect: Expect) -> None:
    random_run(world, expect, fresh_seed(), 30)


@pytest.mark.full
def test_no_page_is_lost_or_held_twice_in_any_cycle(
    start: Callable[..., World], checkpoints: Callable[[str], Path], expect: Expect
) -> None:
    """SGLang counts its pools after every cycle, and ends the rank if they do not add up."""
    checks = {f"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_{when}": "1" for when in ("BUSY", "IDLE")}
    world = start(TINY.argv(str(checkpoints(TINY.checkpoint))), env=checks)
    world.wait_healthy()
    random_run(world, expect, fresh_seed(), 60)


@pytest.mark.full
@on(TINY, TINY_THREE)
def test_many_random_requests(world: World, expect: Expect) -> None:
    """500 random lengths, arrivals and aborts through a pool that holds two or three of them."""
    random_run(world, expect, fresh_seed(), MANY)
