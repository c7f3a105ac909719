"""SGLang without AFD on the CPU platform, in layouts whose missing kernels the platform gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.client import Answer
from tests.support.layouts import STOCK, Layout, on
from tests.support.reference import Expect, References, assert_equal, check
from tests.support.workload import NEW_TOKENS, prompts
from tests.support.world import World

pytestmark = pytest.mark.integration


def stock(note: str, *flags: str) -> Layout:
    """Plain SGLang with more than one rank, on the checkpoint whose tokens experts decide."""
    return Layout(checkpoint="seeded", flags=flags, note=note)


DP2_TP2_EP4 = stock(
    "dp2tp2ep4",
    *("--tp-size", "4", "--attn-dp-size", "2", "--ep-size", "4"),
    *("--moe-dense-tp-size", "1", "--enable-dp-lm-head"),
    *("--chunked-prefill-size", "128"),  # SGLang divides it over the DP ranks
    "--constrained-json-disable-any-whitespace",  # or random weights may write spaces for ever
)
"""Gathers over attention TP and DP, absent experts, idle ranks and chunks, all at once."""

TP2 = stock("tp2", "--tp-size", "2")
DP2 = stock("dp2", "--tp-size", "2", "--attn-dp-size", "2")
EP2 = stock("ep2", "--tp-size", "2", "--ep-size", "2", "--disable-overlap-schedule")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [7, 70]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def expect(references: References, checkpoints: Callable[[str], Path]) -> Expect:
    """What the seeded checkpoint answers."""
    seeded = checkpoints("seeded")
    return lambda asked, new_tokens: references.greedy(seeded, asked, new_tokens)


@on(DP2_TP2_EP4, full=(TP2, DP2, EP2, STOCK.of("seeded")))
def test_tokens_equal_transformers(world: World, expect: Expect) -> None:
    """The workload, and a part of it again: its prompts are in the radix cache by then."""
    asked = prompts()
    answers = check(world, expect, asked, NEW_TOKENS)
    again = []
    for prompt, answer in zip(asked[4:], answers[4:], strict=True):
        # Where it was answered first: else it depends on the order of arrival who has it cached.
        again += check(world, expect, [prompt], 8, routed_dp_rank=answer.dp_rank)
    assert max(answer.cached_tokens for answer in again) > 100


@on(DP2_TP2_EP4)
def test_a_dp_rank_left_idle(world: World, expect: Expect) -> None:
    asked = prompts([30, 2], seed=60)
    answers = check(world, expect, asked, 8, routed_dp_rank=1)
    assert {answer.dp_rank for answer in answers} == {1}


@on(DP2_TP2_EP4)
def test_structured_output(world: World) -> None:
    schema = {"json_schema": json.dumps(SCHEMA), "ignore_eos": False}
    answer = world.generate("Explain", 160, sampling_params=schema)
    assert set(json.loads(answer.text)) == {"name", "age"}
    regex = {"regex": "(yes|no) [0-9]{3}", "ignore_eos": False}
    answer = world.generate("Explain", 40, sampling_params=regex)
    word, digits = answer.text.split(" ")
    assert word in ("yes", "no") and len(digits) == 3 and digits.isdecimal()


@on(DP2_TP2_EP4)
def test_stream_and_abort(world: World, expect: Expect) -> None:
    asked = prompts([20], seed=62)
    chunks = list(world.stream(asked[0], 24, return_logprob=True))
    assert len(chunks) > 10
    assert_equal([Answer.of(chunks[-1])], expect(asked, 24))
    stream = world.stream(asked[0], 2000, rid="long")
    next(stream)
    assert world.post("/abort_request", {"rid": "long"}).status_code == 200
    last = Answer.of(list(stream)[-1])
    assert last.finish == "abort" and len(last.tokens) < 2000
