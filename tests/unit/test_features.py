"""The feature table: complete rows, flags that SGLang has, tests that exist, the document made."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_afd.command_line import WHOLE_FLAGS, values
from sglang_afd.features import (
    DOCUMENT,
    FEATURES,
    KNOWN,
    UNKNOWN,
    Switch,
    document,
    refused,
    refused_request,
)
from sglang_afd.features import __main__ as features_command
from sglang_afd.features.reviewed import PASSED, SETTINGS
from sglang_afd.flags import OWNED

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = [(feature, switch) for feature in FEATURES for switch in feature.switches]
REFUSED = [(feature, switch) for feature, switch in SWITCHES if not feature.served]
DUMP = """
import argparse, json
from sglang_afd.upstream.server import add_sglang_flags
parser = argparse.ArgumentParser(add_help=False)
add_sglang_flags(parser)
actions = [
    {"names": a.option_strings, "switch": a.nargs == 0, "default": a.default,
     "choices": list(map(str, a.choices or [])), "dest": a.dest}
    for a in parser._actions
]
print("FLAGS " + json.dumps(actions, default=str))
"""


@pytest.fixture(scope="module")
def sglang_flags() -> list[dict]:
    """Every flag of SGLang's parser, read in a process of its own."""
    from sglang_afd.platform.defaults import cpu_environment

    environment = {**os.environ, **cpu_environment(1), "SGLANG_AFD_CPU": "1"}
    run = subprocess.run(
        [sys.executable, "-c", DUMP], capture_output=True, text=True, env=environment
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("FLAGS ")]
    assert lines, run.stderr
    return json.loads(lines[0].removeprefix("FLAGS "))


@pytest.fixture(scope="module")
def by_name(sglang_flags: list[dict]) -> dict[str, dict]:
    return {name: flag for flag in sglang_flags for name in flag["names"]}


def positive(names: list[str]) -> set[str]:
    """Names that turn something on: without the --no-... forms."""
    return {name for name in names if not name.startswith("--no-")}


def test_every_flag_of_the_table_is_sglangs(by_name: dict[str, dict]) -> None:
    for feature, switch in SWITCHES:
        assert switch.flag in by_name, f"{feature.name}: SGLang has no {switch.flag}"
        names = positive(by_name[switch.flag]["names"])
        assert names == {switch.flag, *switch.aliases}, f"{feature.name}: names are {names}"


def test_every_owned_flag_is_sglangs(by_name: dict[str, dict]) -> None:
    for spellings, _ in OWNED:
        assert positive(by_name[spellings[0]]["names"]) == set(spellings)


LISTS = {**PASSED, **SETTINGS}


def test_every_flag_of_sglang_is_looked_at_once(by_name: dict[str, dict]) -> None:
    """A flag of a new SGLang version is in no row and no list: decide what becomes of it."""
    assert positive(list(by_name)) - KNOWN == set()
    assert KNOWN - set(by_name) == set()
    rows = [name for _, switch in SWITCHES for name in (switch.flag, *switch.aliases)]
    listed = [name for names in LISTS.values() for name in names]
    owned = [name for spellings, _ in OWNED for name in spellings]
    everything = [*set(rows), *listed, *owned]
    assert len(everything) == len(set(everything))


def test_other_forms_of_switches_begin_with_no(by_name: dict[str, dict]) -> None:
    for name in by_name:
        assert not name.startswith("--no-") or name.replace("--no-", "--", 1) in by_name


@pytest.mark.parametrize("feature", SETTINGS)
def test_settings_are_refused_with_their_feature(feature: str) -> None:
    (row,) = [f for f in FEATURES if f.name == feature]
    assert not row.served
    for flag in SETTINGS[feature]:
        assert (row, flag) in [(asked.feature, asked.by) for asked in refused([flag, "1"], {})]


def test_passed_flags_pass() -> None:
    for names in PASSED.values():
        for flag in names:
            assert not list(refused([f"{flag}=1"], {})), flag


@pytest.mark.parametrize("flag", ["--enable-tomorrow", "--no-such", "--portable"])
def test_a_flag_that_is_nowhere_is_refused(flag: str) -> None:
    assert list(refused([flag, "--port", "1"], {})) == [(UNKNOWN, flag)]


def test_abbreviations_and_other_forms_are_known() -> None:
    assert not list(refused(["--context-len", "9", "--no-enable-tf32-matmul"], {}))
    assert not list(refused(["--no-enable-tp-lm-head-all-to-all"], {}))


def test_values_of_the_table_are_sglangs(by_name: dict[str, dict]) -> None:
    for _, switch in SWITCHES:
        choices = by_name[switch.flag]["choices"]
        if choices:
            assert {*switch.off, *switch.only} <= set(choices), switch.flag
        if by_name[switch.flag]["switch"]:
            assert not switch.off and not switch.only, f"{switch.flag} takes no value"


def test_no_default_is_refused(by_name: dict[str, dict]) -> None:
    for _, switch in REFUSED:
        default = by_name[switch.flag]["default"]
        if default not in (None, False, [], ""):
            assert not switch.turned_on_by(str(default)), f"{switch.flag} {default}"


def test_abbreviations_are_told_from_flags(by_name: dict[str, dict]) -> None:
    begins = {a for a in by_name for b in by_name if a != b and b.startswith(a)}
    assert begins == WHOLE_FLAGS


@pytest.mark.parametrize(("feature", "switch"), REFUSED, ids=lambda x: getattr(x, "flag", ""))
def test_every_refused_flag_is_refused(feature, switch: Switch) -> None:
    value = switch.only[0] if switch.only else "2"
    for name in (switch.flag, *switch.aliases):
        for args in ([name, value], [f"{name}={value}"]):
            (asked,) = refused(args, {})
            assert asked == (feature, f"{switch.flag} {value}")
    for value in switch.off:
        assert not list(refused([switch.flag, value], {}))


def test_a_switch_without_value_is_refused() -> None:
    (asked,) = refused(["--enable-torch-compile", "--port", "1"], {})
    assert asked.by == "--enable-torch-compile"


def test_earlier_values_count_too() -> None:
    args = ["--cuda-graph-backend-prefill", "full", "--cuda-graph-backend-prefill", "disabled"]
    assert [asked.by for asked in refused(args, {})] == ["--cuda-graph-backend-prefill full"]


def test_served_flags_are_not_refused() -> None:
    for feature, switch in SWITCHES:
        if feature.served:
            args = [switch.flag, switch.only[0] if switch.only else "1"]
            assert values(args, switch.flag) and not list(refused(args, {}))


@pytest.mark.parametrize("variable", [name for f in FEATURES for name in f.environment])
def test_every_refused_variable_is_refused(variable: str) -> None:
    for value in ("1", "true", "8000"):
        assert [asked.by for asked in refused([], {variable: value})] == [f"{variable}={value}"]
    for value in ("", "0", "False"):
        assert not list(refused([], {variable: value}))


def test_rows_are_complete() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(names) == len(set(names))
    for feature in FEATURES:
        assert feature.served or (feature.reason and feature.mend), feature.name
        assert not feature.served or not feature.mend, feature.name
        for text in (feature.reason, feature.mend):
            assert "|" not in text and not text.endswith("."), feature.name
        if not feature.served:
            asked_by = (feature.switches, feature.requests, feature.environment)
            assert any(asked_by) or feature.name in SETTINGS, feature.name
    assert sum(feature.served for feature in FEATURES) > 10


@pytest.mark.parametrize("test", sorted({f.test for f in FEATURES if f.served}))
def test_served_rows_name_tests_that_exist(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run: python -m sglang_afd.features"


def test_document_has_a_row_for_each_feature() -> None:
    text = document()
    for feature in FEATURES:
        rows = [line for line in text.splitlines() if line.startswith(f"| {feature.name} |")]
        assert [row.count("|") for row in rows].count(5) == 1, feature.name


def test_refused_requests_are_found() -> None:
    assert refused_request("/update_weights_from_tensor").name.startswith("Weight updates")
    for request in ("/flush_cache", "/nothing"):
        with pytest.raises(KeyError):
            refused_request(request)


@pytest.mark.parametrize("argument", ["--help", "--frobnicate", "out.md"])
def test_only_the_bare_command_writes_the_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argument: str
) -> None:
    monkeypatch.setattr(features_command, "DOCUMENT", tmp_path / "features.md")
    with pytest.raises(SystemExit) as end:
        features_command.main([argument])
    assert end.value.code == (0 if argument == "--help" else 2)
    assert not (tmp_path / "features.md").exists()
    features_command.main([])
    assert (tmp_path / "features.md").read_text() == document()


def test_an_ambiguous_abbreviation_is_one_refusal() -> None:
    for given in (["--cuda-graph-bs", "1"], ["--cuda-graph-bs=1"]):
        [asked] = refused(["--log-level", "info", *given, "--page-size", "1"], {})
        assert asked.by == "--cuda-graph-bs"
        assert asked.feature.reason == (
            "it is short for --cuda-graph-bs-decode, --cuda-graph-bs-prefill"
        )
        assert asked.feature.mend == "write the flag that is meant in full"


@pytest.mark.parametrize(
    ("flag", "off", "on"),
    [
        ("--pp-size", ("01", "+1", " 1", "1"), ("2", "02", "10", "x", "")),
        ("--cpu-offload-gb", ("0.0", "0", "-0", "0e3"), ("0.1", "1", "nan")),
        ("--disaggregation-mode", ("null",), ("NULL", "0")),
    ],
)
def test_a_value_that_leaves_a_feature_off_may_be_spelt_as_numbers_are(
    flag: str, off: tuple[str, ...], on: tuple[str, ...]
) -> None:
    for value in off:
        assert not list(refused([flag, value], {})), value
    for value in on:
        assert len(list(refused([flag, value], {}))) == 1, value
