"""Whatever stands after an --afd-* flag: an error that names the flag, or a deployment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_afd import start
from sglang_afd.command_line import expand_config_file
from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.flags import add_flags, parse
from sglang_afd.machine import Machine
from sglang_afd.topology import TopologyError

pytestmark = pytest.mark.unit

REFUSALS = (ConfigError, TopologyError)
COUNTS = ("--afd-attention-ranks", "2", "--afd-ffn-ranks", "1")
LIMIT = 1000  # characters: an error is a message, not a dump


def flags() -> list[str]:
    """Every --afd-* flag, as its parser has it."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return [action.option_strings[0] for action in parser._actions]


FLAGS = flags()
ROLE = ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5000")
numbers = st.integers() | st.integers(-5, 5000)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
anything = numbers.map(str) | st.floats().map(str) | texts | st.sampled_from(["1_0", "０１", "1e3"])


def test_the_flags_are_all_there() -> None:
    assert len(FLAGS) >= 10 and all(flag.startswith("--afd-") for flag in FLAGS)


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("flag", FLAGS)
@given(value=anything)
@example(value="")
@example(value="-")
@example(value="--")
@example(value="=")
@example(value="9" * 5000)
@example(value="-1")
@example(value="nan")
@example(value="\x00")
def test_any_value(flag: str, joined: bool, value: str) -> None:
    given_as = [f"{flag}={value}"] if joined else [flag, value]
    try:
        config = parse([*COUNTS, *given_as], transport="gloo").config
    except REFUSALS as error:
        # a value that begins with a dash may be taken for a flag of SGLang's, or one of ours
        assert flag in str(error) or (not joined and value.startswith("-"))
        assert "Traceback" not in str(error)
        return
    assert config is not None
    assert AfdConfig.from_json(config.to_json()) == config, "as the ranks read it"


words = (
    st.sampled_from([*FLAGS, *COUNTS, *ROLE, "ffn", "attention", "auto", "--tp-size"]) | anything
)


@given(st.lists(words, max_size=12))
def test_any_command_line(argv: list[str]) -> None:
    try:
        command = parse(argv, transport="gloo")
    except REFUSALS as error:
        assert str(error)
        return
    assert not any(arg.startswith("--afd-") for arg in command.sglang_args)
    assert command.config is not None or command.sglang_args == argv


values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([flag[2:] for flag in FLAGS]) | texts, values, max_size=4))
def test_any_config_file(tmp_path: Path, options: dict[str, Any]) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(yaml.safe_dump(options))
    try:
        parse(expand_config_file(["--config", str(file)]), transport="gloo")
    except REFUSALS as error:
        assert str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40))
@example(b"\xff\xfe")
@example(b"a: \x00")
@example(b"? [1, 2]\n: 3")
@example(b"&a [*a]")
@example(b"a: 2026-13-45")
def test_any_bytes_as_config_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "options.yaml"
    file.write_bytes(content)
    try:
        expand_config_file(["--config", str(file)])
    except ConfigError as error:
        assert f"--config {file}" in str(error)


@pytest.mark.parametrize("name", ["", "\x00", "x" * 5000, ".", "/proc/self/mem"])
def test_any_name_as_config_file(name: str) -> None:
    with pytest.raises(ConfigError, match="--config"):
        expand_config_file(["--config", name])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(words, max_size=6))
def test_the_command_refuses_with_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    """Up to the gates: status 2 and one line of error, never a traceback."""
    monkeypatch.setattr(start, "this_machine", Machine)
    try:
        start.read_facts([*COUNTS, *argv], program="check")
    except SystemExit as end:
        assert end.code in (0, 2)  # 0: it asks for help
        printed = capsys.readouterr().err
        assert end.code == 0 or printed.startswith("check: error: ")
