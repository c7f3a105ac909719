"""Keyword arguments of the offline engine become the server's flags."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from sglang_afd import start
from sglang_afd.engine import Engine, in_keywords, to_argv
from sglang_afd.flags import add_flags
from sglang_afd.platform.defaults import cpu_environment
from sglang_afd.upstream import server

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
        ({"afd_attention_ranks": 1}, "give both afd_attention_ranks and afd_ffn_ranks"),
        ({"afd_attention_ranks": 1, "afd_ffn_ranks": 5}, "5"),
        ({"afd_attention_ranks": 1, "afd_ffn_ranks": 1, "tp_size": 2}, "^tp_size is set by"),
        ({"afd_attention_ranks": False, "afd_ffn_ranks": 1}, "'False'"),
        ({"afd_attention_ranks": 1, "afd_ffn_ranks": 1, "server_args": 1}, "takes no server_args"),
        ({"afd_attention_ranks": 1, "afd_ffn_ranks": 1, "afd_restart": 1}, "an Engine has none"),
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


def test_what_sglang_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error to catch, not an exit; in the spelling of keyword arguments."""

    def parse(args: list[str]) -> None:
        assert args[:2] == ["--foo", "3"]
        raise server.FlagError("unrecognized arguments: --foo 3")

    monkeypatch.setattr(start, "resolve", lambda argv, program: start.Command(None, argv))
    monkeypatch.setattr(server, "install_plugins", lambda: None)
    monkeypatch.setattr(server, "parse", parse)
    with pytest.raises(start.Refused, match=r"^unrecognized arguments: foo 3$"):
        Engine(foo=3)


def test_messages_speak_of_keywords() -> None:
    said = in_keywords("--afd-role ffn needs --nnodes 2; see --help for the --afd-* flags")
    assert said == "afd_role ffn needs nnodes 2; see --help for the afd_* flags"


def test_every_afd_argument_is_documented() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    for action in parser._actions:
        assert f"``{action.dest}``" in (Engine.__doc__ or "")
