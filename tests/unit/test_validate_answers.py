"""The comparison of two servers finds what differs, and by how much."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from benchmarks.agreement import Continuation, compare, continue_greedily, random_prompts, record

pytestmark = pytest.mark.unit

PROMPTS = [[3, 4], [5, 6, 7], [8]]
TOKENS = 4


class Model:
    """Answers as SGLang's ``/generate`` does: after token t comes t + 1, with logprob -0.5.

    `lead` is what another token leads t + 1 by, by the position of t + 1 in its sequence.
    """

    def __init__(self, lead: dict[int, float] | None = None, own_step: int = 1) -> None:
        self.lead, self.own_step = lead or {}, own_step
        self.shift = 0
        self.bodies: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/generate"
        with self._lock:
            self.bodies.append(body)
        return self._forced(body) if "logprob_start_len" in body else self._greedy(body)

    def _greedy(self, body: dict[str, Any]) -> dict[str, Any]:
        count = body["sampling_params"]["max_new_tokens"]
        tokens = [body["input_ids"][-1] + self.own_step * (i + 1) for i in range(count)]
        logprobs = [[-0.5, token, None] for token in tokens]
        return {"output_ids": tokens, "meta_info": {"output_token_logprobs": logprobs}}

    def _forced(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["input_ids"]
        given: list[Any] = [[None, ids[0], None]]  # nothing stands before the first token
        top: list[Any] = [None]
        for position in range(1, len(ids)):
            lead = self.lead.get(position, 0.0)
            given.append([-0.5 - self.shift, ids[position], None])
            top.append([[given[-1][0] + lead, ids[position] if lead == 0 else 999, None]])
        start = body["logprob_start_len"]
        return {
            "meta_info": {"input_token_logprobs": given[start:], "input_top_logprobs": top[start:]}
        }


def reference() -> list[Continuation]:
    return continue_greedily(Model(), PROMPTS, tokens=TOKENS)  # type: ignore[arg-type]


def against(model: Model, expected: list[Continuation] | None = None) -> dict[str, Any]:
    return compare(model, expected or reference(), tokens=TOKENS)  # type: ignore[arg-type]


def test_a_continuation_keeps_prompt_tokens_and_logprobs_in_order() -> None:
    assert reference()[1] == Continuation([5, 6, 7], [8, 9, 10, 11], [-0.5] * 4)
    assert record(reference())[2] == {
        "prompt": [8],
        "tokens": [9, 10, 11, 12],
        "logprobs": [-0.5] * 4,
    }


def test_the_same_server_agrees_everywhere() -> None:
    result = against(Model())
    assert result["greedy_equal_prompts"] == result["prompts"] == len(PROMPTS)
    assert result["first_divergence"] == [None] * len(PROMPTS)
    assert result["forced_positions"] == len(PROMPTS) * TOKENS
    assert result["forced_top1_share"] == 1
    assert result["forced_differing"] == []
    assert result["all_near_ties"]
    assert result["largest_logprob_error"] == 0


def test_teacher_forcing_asks_for_every_reference_token() -> None:
    model = Model()
    against(model)
    forced = [body for body in model.bodies if "logprob_start_len" in body]
    assert sorted(len(body["input_ids"]) for body in forced) == [5, 6, 7]
    for body in forced:
        assert body["logprob_start_len"] == len(body["input_ids"]) - TOKENS - 1


def test_a_near_tie_is_counted_and_named_by_its_position() -> None:
    result = against(Model(lead={5: 0.125}))  # position 5 lies in the first two continuations
    assert result["forced_top1_share"] == 1 - 2 / 12
    assert [p["position"] for p in result["forced_differing"]] == [5, 5]
    assert [p["margin"] for p in result["forced_differing"]] == [0.125, 0.125]
    assert result["largest_margin"] == 0.125
    assert result["all_near_ties"]


def test_one_wide_margin_is_no_near_tie() -> None:
    result = against(Model(lead={2: 0.125, 6: 0.5}))
    assert result["largest_margin"] == 0.5
    assert not result["all_near_ties"]


def test_a_prompts_own_positions_are_not_compared() -> None:
    assert against(Model(lead={1: 7.0}), reference()[:2])["forced_top1_share"] == 1


def test_a_greedy_divergence_is_named_by_its_first_token() -> None:
    expected = reference()
    expected[1].tokens[2] += 50
    result = against(Model(), expected)
    assert result["greedy_equal_prompts"] == 2
    assert result["first_divergence"] == [None, 2, None]


def test_logprob_errors_count_where_the_top_token_agrees_too() -> None:
    model = Model()
    model.shift = 2
    result = against(model)
    assert result["forced_top1_share"] == 1
    assert result["largest_logprob_error"] == result["mean_logprob_error"] == 2


def test_an_answer_about_other_tokens_is_an_error() -> None:
    class Shifted(Model):
        def _forced(self, body: dict[str, Any]) -> dict[str, Any]:
            answer = super()._forced(body)
            answer["meta_info"]["input_token_logprobs"].pop()
            return answer

    with pytest.raises(RuntimeError, match="asked for the logprob of"):
        against(Shifted())


def test_prompts_are_a_seeds() -> None:
    first = random_prompts((1, 5, 40), vocab=64, seed=2)
    assert first == random_prompts((1, 5, 40), vocab=64, seed=2)
    assert first != random_prompts((1, 5, 40), vocab=64, seed=3)
    assert [len(p) for p in first] == [1, 5, 40]
    assert all(3 <= token < 64 for prompt in first for token in prompt)
