"""EAGLE-3 under AFD: the tokens of decoding one by one, whatever the draft gets right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.client import Answer
from tests.support.layouts import A1F1, A1T2F1, A2F1, A2F2, Layout, on, speculating
from tests.support.processes import wait_until
from tests.support.reference import Expect, check
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = pytest.mark.integration

STANDARD = speculating(A2F1, 3, 1, 4)
TREE = speculating(A1F1, 3, 2, 6)
OTHERS = (
    *(speculating(A1F1, *shape) for shape in ((1, 1, 2), (3, 1, 4), (7, 1, 8))),
    *(speculating(layout, 3, 1, 4) for layout in (A2F2, A1T2F1)),
    *(speculating(layout, 3, 2, 6) for layout in (A2F2,)),
    *(speculating(A2F2, *shape) for shape in ((1, 1, 2), (7, 1, 8))),
)


def acceptance(answers: Sequence[Answer]) -> float:
    """Tokens that a verify step gave, the one that the target adds included."""
    steps = sum(answer.meta["spec_verify_ct"] for answer in answers)
    return sum(len(answer.tokens) - 1 for answer in answers) / steps


def used_tokens(world: World) -> list[int]:
    return [load["num_used_tokens"] for load in world.get("/v1/loads").json()["loads"]]


def nothing_left(world: World) -> None:
    """Every page of every rank can be had again."""
    response = world.post("/flush_cache", params={"timeout": 20})
    assert response.status_code == 200, response.text
    assert wait_until(lambda: not any(used_tokens(world)), 10), used_tokens(world)


@on(STANDARD, full=(TREE, *OTHERS))
def test_tokens_are_those_without_speculation(world: World, layout: Layout, expect: Expect) -> None:
    """Mixed lengths at different times, prompts in chunks; some drafts are right, some are not."""
    answers = check(world, expect, prompts(), 64)
    assert layout.speculation is not None
    assert 1.1 < acceptance(answers) < layout.speculation[2], acceptance(answers)
    nothing_left(world)


@on(STANDARD, full=(TREE,))
def test_a_rank_left_idle(world: World, layout: Layout, expect: Expect) -> None:
    """All requests on the last DP rank: others take part in every step without a token."""
    last = layout.attention - 1
    answers = check(world, expect, prompts(), 24, routed_dp_rank=last)
    assert {answer.dp_rank for answer in answers} == {last}


@on(STANDARD, full=(TREE, *OTHERS))
def test_a_cached_prefix_is_the_drafts_too(world: World, expect: Expect) -> None:
    """Prompts that share a prefix reuse its KV, the draft's with it."""
    [stem] = prompts([150], seed=22)
    tails = prompts([5, 9, 1, 30], seed=23)
    check(world, expect, [stem], 8, routed_dp_rank=0)
    answers = check(world, expect, [stem + tail for tail in tails], 32, routed_dp_rank=0)
    # What the draft keeps of the prefix's last token depends on the one that follows.
    assert all(answer.cached_tokens >= len(stem) - 1 for answer in answers)
    assert acceptance(answers) > 1.1
    nothing_left(world)


@on(STANDARD, full=(TREE, *OTHERS))
def test_abort(world: World, layout: Layout, expect: Expect) -> None:
    """Requests end by name or by hanging up, in chunks too; those beside them are right."""
    victims, others = prompts([20, 20, 1500], seed=63), prompts([30, 40], seed=64)
    kept = [world.stream(prompt, 64, routed_dp_rank=0) for prompt in others]
    for stream in kept:
        next(stream)
    doomed = [
        world.stream(prompt, 2000, rid=f"doomed{i}", routed_dp_rank=0)
        for i, prompt in enumerate(victims)
    ]
    next(doomed[0])
    doomed[0].close()
    next(doomed[1])
    for i in (1, 2):
        assert world.post("/abort_request", {"rid": f"doomed{i}"}).status_code == 200
    *_, last = doomed[1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    for stream, want in zip(kept, expect(others, 64)):
        *_, last = stream
        assert tuple(last["output_ids"]) == want.tokens
    nothing_left(world)
