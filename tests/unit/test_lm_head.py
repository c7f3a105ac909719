"""Every A rank has the whole output projection, or its share in its attention group."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_afd.upstream.lm_head import HOOKS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, True), ({"use_attn_tp_group": True}, True), ({"use_attn_tp_group": False}, False)],
)
def test_a_model_class_that_says_nothing_gets_the_attention_group(
    given: dict[str, Any], expected: bool
) -> None:
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    [hook] = HOOKS
    assert hook.target.endswith(f"{ParallelLMHead.__name__}.__init__")
    head = object()
    hook.fn(lambda *args, **kwargs: calls.append((args, kwargs)), head, 99, 8, prefix="x", **given)
    assert calls == [((head, 99, 8), {"prefix": "x", "use_attn_tp_group": expected})]
