"""The same greedy tokens everywhere: HF transformers, SGLang without AFD, every layout of AFD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.client import Answer
from tests.support.layouts import (
    A1F1,
    A1T2F1,
    A2F1,
    A2F2,
    A3F1,
    CAD,
    CAD_FAMILIES,
    CAD_WIDER,
    SMALL,
    STOCK,
    Layout,
    families,
    on,
)
from tests.support.reference import Expect, References, assert_equal, check
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

Checkpoints = Callable[[str], Path]
_SEEDED = [layout.of("seeded") for layout in (STOCK, A1F1, A2F1, A2F2, A3F1, A1T2F1)]


@on(STOCK, A2F1.of("seeded"), A1T2F1, CAD.of("seeded"), full=(A1F1, A2F1, A2F2, A3F1))
def test_tokens_equal_transformers(
    world: World, layout: Layout, references: References, checkpoints: Checkpoints
) -> None:
    """8 prompts of mixed lengths, arriving at different times, 64 tokens each."""
    asked = prompts()
    answers = send(world, asked)
    assert_equal(answers, references.greedy(checkpoints(layout.checkpoint), asked))
    if layout.attention:
        used = {answer.dp_rank for answer in answers}
        assert used == set(range(layout.leading)), f"requests went to DP ranks {used}"


@pytest.mark.full
@on(
    *(layout for layout in _SEEDED if layout != A2F1.of("seeded")),
    *families(STOCK, A1F1, A2F1, A2F2, A1T2F1),
)
def test_seeded_tokens_equal_transformers(
    world: World, layout: Layout, references: References, checkpoints: Checkpoints
) -> None:
    """The same for checkpoints of other dimensions and families, in two shards."""
    if str(layout) == "1A1F-tp2-qwen3.5-vision":
        pytest.xfail("open: one log-probability is off by 1.15e-4, over the 1e-4 allowed")
    test_tokens_equal_transformers(world, layout, references, checkpoints)


@on(A2F1.of("zeroed"))
def test_zeroed_experts_change_the_answers(
    world: World, references: References, checkpoints: Checkpoints
) -> None:
    """Were the experts' part lost on the way, the other tests would notice."""
    asked = prompts()
    answers = send(world, asked, 16)
    assert_equal(answers, references.greedy(checkpoints("zeroed"), asked, 16))
    trained = references.greedy(checkpoints("seeded"), asked, 16)
    assert all(a.tokens != t.tokens for a, t in zip(answers, trained))


@on(
    SMALL,
    *families(SMALL, wrapped=False),
    CAD,
    *CAD_WIDER,
    *CAD_FAMILIES,
    full=(
        *families(SMALL, wrapped=True),
        *(layout.of(cad.checkpoint) for layout in CAD_WIDER for cad in CAD_FAMILIES),
    ),
)
def test_small_caps(world: World, expect: Expect) -> None:
    """The whole workload, although a prompt takes chunks and a chunk takes slices."""
    check(world, expect, prompts(), 64)


@on(SMALL, *families(SMALL, wrapped=False), CAD_WIDER[1], full=families(SMALL, wrapped=True))
def test_a_rank_left_idle(world: World, expect: Expect) -> None:
    """All requests on DP rank 1: rank 0 takes part in every exchange without a token."""
    answers = check(world, expect, prompts(), 24, routed_dp_rank=1)
    assert {answer.dp_rank for answer in answers} == {1}


@on(SMALL, CAD_WIDER[1])
def test_a_batch_without_tokens_of_one_rank(world: World, expect: Expect) -> None:
    """Rank 1 runs out of requests, and gets one again, while rank 0 still decodes."""
    first, short, late = prompts([20, 10, 90], seed=26)
    length = 160
    long = world.stream(first, 1500, routed_dp_rank=0, return_logprob=True)
    next(long)
    check(world, expect, [short], 4, routed_dp_rank=1)
    check(world, expect, [late], 8, routed_dp_rank=1)
    running = [load["num_running_reqs"] for load in world.get("/v1/loads").json()["loads"]]
    assert running[0] == 1, "the long request was to outlast the others"
    parts = (Answer.of(body) for body in long)
    answer = next(part for part in parts if len(part.tokens) >= length)
    long.close()
    tokens, logprobs = answer.tokens[:length], answer.logprobs[:length]
    assert_equal([replace(answer, tokens=tokens, logprobs=logprobs)], expect([first], length))
