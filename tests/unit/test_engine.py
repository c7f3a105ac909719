"""Keyword arguments of the offline engine become the server's flags."""

from __future__ import annotations

import pytest

from sglang_afd import start
from sglang_afd.engine import Engine, to_argv


def test_values_become_flags() -> None:
    assert to_argv({"afd_attention_ranks": 2, "dtype": "float32"}) == [
        *("--afd-attention-ranks", "2", "--dtype", "float32"),
    ]


def test_switches_lists_and_dictionaries() -> None:
    arguments = {
        "trust_remote_code": True,
        "disable_radix_cache": False,
        "revision": None,
        "cuda_graph_bs": [1, 2],
        "json_model_override_args": {"a": 1},
    }
    assert to_argv(arguments) == [
        *("--trust-remote-code", "--cuda-graph-bs", "1", "2"),
        *("--json-model-override-args", '{"a": 1}'),
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"afd_attention_ranks": 1}, "--afd-ffn-ranks"),
        ({"afd_attention_ranks": 1, "afd_ffn_ranks": 5}, "5"),
        ({"afd_attention_ranks": 1, "afd_ffn_ranks": 1, "tp_size": 2}, "--tp-size"),
    ],
)
def test_refused_as_the_server_refuses(arguments: dict[str, int], says: str) -> None:
    with pytest.raises(start.Refused, match=says):
        Engine(**arguments)
