"""Keyword arguments of the offline engine become the server's flags."""

from __future__ import annotations

import argparse

import pytest

from sglang_afd import start
from sglang_afd.engine import Engine, in_keywords, to_argv
from sglang_afd.flags import add_flags
from sglang_afd.upstream import server


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
    ],
)
def test_refused_as_the_server_refuses(arguments: dict[str, int], says: str) -> None:
    with pytest.raises(start.Refused, match=says):
        Engine(**arguments)


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
