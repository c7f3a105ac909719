"""Keyword arguments of the offline engine become the server's flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from sglang_afd import start
from sglang_afd.engine import Engine, to_argv
from sglang_afd.platform.defaults import cpu_environment

OFF = """
import json, sys
from sglang_afd.upstream.server import switched_off
for name in json.loads(sys.argv[1]):
    try:
        said = switched_off([name])
    except ValueError as error:
        said = str(error)
    print("SAID " + json.dumps(said))
"""


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
        ({"afd_attention_ranks": False, "afd_ffn_ranks": 1}, "'False'"),
        ({"afd_attention_ranks": 1, "afd_ffn_ranks": 1, "server_args": 1}, "takes no server_args"),
    ],
)
def test_refused_as_the_server_refuses(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(start.Refused, match=says):
        Engine(**arguments)


def test_false_is_said_or_refused() -> None:
    """Never dropped where SGLang would then choose by itself."""
    expected = {
        "disable_radix_cache": [],
        "enable_fused_qk_norm_rope": ["--no-enable-fused-qk-norm-rope"],
        "dllm_fdfo": ["--no-dllm-fdfo"],
        "enable_lora": "enable_lora=False: no flag of SGLang's says that; leave enable_lora out",
        "page_size": "page_size=False: no flag of SGLang's says that; leave page_size out",
        "enable_magic": "enable_magic=False: SGLang's server has no argument enable_magic",
    }
    done = subprocess.run(
        [sys.executable, "-c", OFF, json.dumps(list(expected))],
        env={**os.environ, **cpu_environment(1), "SGLANG_AFD_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if "SAID" in line]
    assert list(map(json.loads, said)) == list(expected.values()), done.stderr[-2000:]
