"""What is asked of servers, and what of their answers is no answer."""

from __future__ import annotations

import io
import math
import threading
import urllib.error
from email.message import Message
from typing import Any

import pytest

from sglang_afd.validate.answers import (
    BEYOND,
    TOP,
    Continuation,
    Unanswered,
    ask_all,
    continue_greedily,
    continued,
    finite,
    forced,
    random_prompts,
)
from sglang_afd.validate.comparison import all_prompts, compare
from sglang_afd.validation.report import NO_LAYERS, PromptResult, figures_of

pytestmark = pytest.mark.unit

PROMPTS = [[3, 4], [5, 6, 7], [8]]
TOKENS = 4


class Model:
    """Answers as SGLang's ``/generate`` does: after token t comes t + 1, with logprob -0.5.

    `lead` is what other tokens lead t + 1 by, by the position of t + 1 in its sequence; `better` is
    how many do.
    """

    def __init__(self, lead: dict[int, float] | None = None, better: int = 1) -> None:
        self.lead, self.better = lead or {}, better
        self.shift: float = 0
        self.bodies: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 0) -> Any:
        assert path == "/generate" and body is not None
        with self._lock:
            self.bodies.append(body)
        return self.force(body) if "logprob_start_len" in body else self.greedy(body)

    def greedy(self, body: dict[str, Any]) -> dict[str, Any]:
        count = body["sampling_params"]["max_new_tokens"]
        tokens = [body["input_ids"][-1] + i + 1 for i in range(count)]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "output_top_logprobs": [[[-0.5, t, None], [-0.75, 1, None]] for t in tokens],
        }
        return {"output_ids": tokens, "meta_info": meta}

    def force(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["input_ids"]
        given: list[Any] = [[None, ids[0], None]]  # nothing stands before the first token
        top: list[Any] = [None]
        for position in range(1, len(ids)):
            own = -0.5 - self.shift
            lead = self.lead.get(position)
            best = [] if lead is None else [[own + lead, 999, None]] * self.better
            given.append([own, ids[position], None])
            top.append([*best, [own, ids[position], None]][: body["top_logprobs_num"]])
        start = body["logprob_start_len"]
        return {
            "meta_info": {"input_token_logprobs": given[start:], "input_top_logprobs": top[start:]}
        }


def reference() -> list[Continuation]:
    return continue_greedily(Model(), PROMPTS, tokens=TOKENS)


def against(model: Model, expected: list[Continuation] | None = None) -> list[PromptResult]:
    return compare(model, expected or reference(), tokens=TOKENS)


def figures(results: list[PromptResult]) -> dict[str, Any]:
    return figures_of(results, NO_LAYERS)


def test_a_continuation_keeps_everything_in_order() -> None:
    assert reference()[1] == Continuation(
        prompt=[5, 6, 7], tokens=[8, 9, 10, 11], logprobs=[-0.5] * 4, gaps=[0.25] * 4
    )


def test_the_same_server_agrees_everywhere() -> None:
    found = figures(against(Model()))
    assert found["greedy_equal_prompts"] == found["prompts"] == len(PROMPTS)
    assert found["positions"] == len(PROMPTS) * TOKENS
    assert found["top1_share"] == found["max_rank"] == found["mean_rank"] == 1
    assert found["largest_margin"] == found["largest_logprob_error"] == 0


def test_teacher_forcing_asks_for_every_reference_token() -> None:
    model = Model()
    against(model)
    bodies = [body for body in model.bodies if "logprob_start_len" in body]
    assert sorted(len(body["input_ids"]) for body in bodies) == [5, 6, 7]
    for body in bodies:
        assert body["logprob_start_len"] == len(body["input_ids"]) - TOKENS - 1


def test_ranks_and_margins_stand_at_their_positions() -> None:
    results = against(Model(lead={5: 0.125}, better=3))  # in the first two continuations
    assert [result.ranks for result in results] == [[1, 1, 1, 4], [1, 1, 4, 1], [1, 1, 1, 1]]
    assert results[1].margins == [0, 0, 0.125, 0]
    found = figures(results)
    assert found["top1_share"] == 1 - 2 / 12 and found["top10_share"] == 1
    assert found["max_rank"] == 4


def test_a_tie_is_no_loss_of_rank() -> None:
    assert figures(against(Model(lead={5: 0.0})))["max_rank"] == 1


def test_a_rank_beyond_the_ones_that_are_looked_at() -> None:
    found = figures(against(Model(lead={5: 1.0}, better=TOP + 20)))
    assert found["max_rank"] == BEYOND and found["top100_share"] == 1 - 2 / 12


def test_a_prompts_own_positions_are_not_compared() -> None:
    assert figures(against(Model(lead={1: 7.0}), reference()[:2]))["top1_share"] == 1


def test_a_greedy_divergence_is_named_by_its_first_token_and_gap() -> None:
    expected = reference()
    expected[1].tokens[2] += 50
    expected[1].gaps[2] = 0.125
    results = against(Model(), expected)
    assert [r.first_divergence for r in results] == [None, 2, None]
    assert results[1].divergence_gap == 0.125
    assert len(results[1].decode_errors) == 2, "logprobs of what follows have other contexts"


def test_logprob_errors_count_where_the_top_token_agrees_too() -> None:
    model = Model()
    model.shift = 2
    found = figures(against(model))
    assert found["top1_share"] == 1
    assert found["largest_logprob_error"] == found["mean_logprob_error"] == 2


def test_prompts_are_a_seeds() -> None:
    first = random_prompts((1, 5, 40), vocab=64, seed=2)
    assert first == random_prompts((1, 5, 40), vocab=64, seed=2)
    assert first != random_prompts((1, 5, 40), vocab=64, seed=3)
    assert [len(p) for p in first] == [1, 5, 40]
    assert all(3 <= token < 64 for prompt in first for token in prompt)


def test_a_recorded_request_takes_nothing_out_of_the_prefix_cache() -> None:
    model = Model()
    continued(model, [3], TOKENS)
    continued(model, [3], TOKENS, record_as=4)
    plain, recorded = model.bodies
    assert "rid" not in plain and "extra_key" not in plain
    assert recorded["rid"].startswith("sglang_afd-record-4-") and recorded["extra_key"]


class Broken(Model):
    """Spoils one answer of each kind."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def greedy(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().greedy(body)
        self.change(answer)
        return answer


def _truncate(answer: dict[str, Any]) -> None:
    answer["output_ids"].pop()


def _set(path: str, row: int, value: object) -> Any:
    def change(answer: dict[str, Any]) -> None:
        answer["meta_info"][path][row][0] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_truncate, "truncated: 3 of 4 tokens"),
        (_set("output_token_logprobs", 2, None), "1 of 4 logprobs are not finite"),
        (_set("output_token_logprobs", 2, math.nan), "not finite"),
        (lambda answer: answer["meta_info"]["output_token_logprobs"].pop(), "truncated"),
        (lambda answer: answer["meta_info"]["output_top_logprobs"].pop(), "truncated"),
    ],
    ids=["tokens", "null", "nan", "logprobs", "top logprobs"],
)
def test_a_spoilt_answer_is_a_failure(change: Any, says: str) -> None:
    with pytest.raises(Unanswered, match=says):
        continued(Broken(change), [3], TOKENS)


class BrokenForced(Model):
    """Spoils what it gives under teacher forcing."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def force(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().force(body)
        self.change(answer["meta_info"])
        return answer


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda meta: meta["input_token_logprobs"].pop(), "of other tokens"),
        (lambda meta: meta["input_token_logprobs"].clear(), "truncated"),
        (lambda meta: meta["input_top_logprobs"].clear(), "truncated"),
        (lambda meta: meta["input_token_logprobs"][-1].__setitem__(0, None), "not finite"),
        (lambda meta: meta["input_top_logprobs"][-1][0].__setitem__(0, None), "not finite"),
        (lambda meta: meta["input_top_logprobs"].__setitem__(-1, []), "most likely tokens"),
    ],
    ids=["shifted", "none", "no top", "null", "null on top", "empty top"],
)
def test_a_spoilt_ranking_is_a_failure(change: Any, says: str) -> None:
    with pytest.raises(Unanswered, match=says):
        forced(BrokenForced(change), reference()[0])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (urllib.error.HTTPError("", 400, "", Message(), io.BytesIO(b"too long")), "400: too long"),
        (ConnectionRefusedError("gone"), "no answer: ConnectionRefusedError"),
        (TimeoutError("late"), "no answer: TimeoutError"),
    ],
    ids=["refused", "gone", "late"],
)
def test_a_request_without_an_answer_is_a_failure(error: Exception, says: str) -> None:
    class Refusing:
        def call(self, *args: Any, **kwargs: Any) -> Any:
            raise error

    with pytest.raises(Unanswered, match=says):
        continued(Refusing(), [3], TOKENS)


def test_an_answer_of_another_shape_is_a_failure() -> None:
    class Other:
        def call(self, *args: Any, **kwargs: Any) -> Any:
            return {"error": "no such thing"}

    [answer] = ask_all(lambda prompt: continued(Other(), prompt, TOKENS), [[3]])
    assert isinstance(answer, Unanswered) and "malformed" in str(answer)


def test_every_unanswered_prompt_is_a_problem_of_its_side() -> None:
    good, model = reference(), Model()
    seen = [forced(model, entry) for entry in good]
    results, problems = all_prompts(
        [good[0], Unanswered("r"), good[2]], [good[0], good[1], Unanswered("c")], seen
    )
    assert [result.prompt for result in results] == [0]
    assert [(p.side, p.prompt, p.what) for p in problems] == [
        ("reference", 1, "r"),
        ("candidate", 2, "c"),
    ]


def test_infinities_are_not_finite() -> None:
    with pytest.raises(Unanswered, match="2 of 3"):
        finite([-math.inf, 0.0, math.inf])
