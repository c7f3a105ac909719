"""The embedded model's own draft, served: it is right as often as its training estimated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from sglang_afd import embedded
from tests.integration.test_speculation import acceptance, nothing_left
from tests.support.layouts import A2F1, STOCK, on
from tests.support.reference import Expect
from tests.support.workload import send
from tests.support.world import World

pytestmark = pytest.mark.integration

FLAGS = (
    *("--speculative-algorithm", "EAGLE3"),
    *("--speculative-draft-model-path", str(embedded.draft_path())),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
DRAFTED = replace(A2F1, flags=FLAGS, note="own-draft")
ALONE = replace(STOCK, flags=(*STOCK.flags, *FLAGS), note="own-draft")
TOKENS = 64
COMPARED = 6
"""Of the prompts, answers that are compared with the reference: it takes longer than serving."""
FOLDER = embedded.path().parent
PROMPTS: dict[str, list[list[int]]] = json.loads((FOLDER / "draft_prompts.json").read_text())
ESTIMATES: dict[str, dict[str, float]] = json.loads((FOLDER / "draft_curve.json").read_text())[
    "acceptance"
]
MAY_END = {"sampling_params": {"ignore_eos": False}}


def ask(world: World, prompts: list[list[int]], expected: Callable[..., list]) -> float:
    """Acceptance length of the answers, of which the first are those without a draft."""
    answers = send(
        world, prompts, TOKENS, delays=[0.0] * len(prompts), fields=lambda _: dict(MAY_END)
    )
    for answer, want in zip(answers, expected(prompts[:COMPARED], TOKENS)):
        assert answer.tokens == want.tokens[: len(answer.tokens)]
    return acceptance(answers)


@on(DRAFTED)
@pytest.mark.parametrize("held_out", sorted(PROMPTS))
def test_it_is_right_as_often_as_was_estimated(world: World, expect: Expect, held_out: str) -> None:
    """On what is held out from its training: prompts of documents, questions by their wording."""
    found = ask(world, PROMPTS[held_out], expect)
    assert found == pytest.approx(ESTIMATES[held_out]["length"], rel=0.03)
    nothing_left(world)


def test_held_out_text_is_accepted_two_tokens_a_step() -> None:
    """The bound that the draft was trained for, by the estimate that the test above confirms."""
    assert ESTIMATES["held-out wordings"]["length"] >= 2.0


@pytest.mark.full
@on(DRAFTED)
def test_acceptance_is_that_of_sglang_alone(
    world: World, start: Callable[..., World], expect: Expect
) -> None:
    alone = start(ALONE.argv(str(embedded.path()))).wait_healthy()
    prompts = [prompt for prompts in PROMPTS.values() for prompt in prompts]
    here, there = (ask(server, prompts, expect) for server in (world, alone))
    assert here == pytest.approx(there, rel=0.01), (here, there)
