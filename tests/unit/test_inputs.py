"""Requests that would fail inside a forward are refused before they reach a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_afd.upstream.inputs import HOOKS

pytestmark = pytest.mark.unit

VOCABULARY = 100
MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))


def look(input_ids: list[int] | None, **fields: Any) -> None:
    HOOKS[0].fn(MANAGER, SimpleNamespace(**fields), input_ids)


@pytest.mark.parametrize(
    ("input_ids", "fields", "expected"),
    [
        ([], {}, "the prompt has no tokens; give at least one"),
        ([], {"session_params": {"id": "s"}}, "has no tokens"),
        ([100], {}, "input_ids has token 100; the model's are 0 to 99"),
        ([0, 99, 10**12, 3], {}, "has token 1000000000000"),
        ([1, -5, 2], {}, "has token -5"),
        ([-1], {"session_params": {"id": "s"}}, "has token -1"),
        ([1], {"top_logprobs_num": 101}, "top_logprobs_num is 101; the model has 100 tokens"),
        ([1], {"top_logprobs_num": -1}, "top_logprobs_num is -1"),
    ],
)
def test_uncomputable_requests_are_refused(
    input_ids: list[int], fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError) as error:
        look(input_ids, **fields)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("input_ids", "fields"),
    [
        ([0, 99], {}),
        ([1], {"top_logprobs_num": 100}),
        ([1], {"top_logprobs_num": None, "input_embeds": None}),
        ([], {"session_params": {"id": "s", "rid": "r"}}),
        (None, {"input_embeds": [[0.5]]}),
        ([], {"input_embeds": [[0.5]]}),
    ],
)
def test_others_pass(input_ids: list[int] | None, fields: dict[str, Any]) -> None:
    look(input_ids, **fields)
