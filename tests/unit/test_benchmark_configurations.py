"""Configurations: the shipped ones are right, and what is wrong is refused with file and key."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import __main__ as command
from benchmarks import systems
from benchmarks.configuration import (
    KINDS,
    Afd,
    BadConfiguration,
    Colocated,
    Decode,
    kind_of,
    load,
    load_all,
)
from benchmarks.models import SHAPES, Model, NoModel, prepare
from benchmarks.record import RESULTS, ROOT
from benchmarks.results_folder import look
from sglang_afd.config import TRANSPORTS
from sglang_afd.flags import add_flags

pytestmark = pytest.mark.unit

GOOD: dict[str, Any] = {
    "kind": "decode",
    "regime": "words",
    "model": "embedded",
    "context": 8,
    "batch": 4,
    "baseline": "stock",
    "systems": {
        "stock": {"layout": "colocated", "gpus": 2},
        "afd": {"layout": "afd", "ffn_ranks": 2, "lanes": 2},
    },
}
SHIPPED = load_all()
MODEL = Model(Path("/m"), ("--load-format", "dummy"), 9)


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "some.yaml"
    file.write_bytes(msgspec.yaml.encode({**GOOD, **changes}))
    return file


def test_every_kind_has_a_configuration_but_those_of_later_work() -> None:
    kinds = {kind_of(entry) for entry in SHIPPED.values()}
    assert kinds == set(KINDS) - {"spec", "cad"}


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_configurations_name_what_there_is(name: str) -> None:
    entry = SHIPPED[name]
    assert entry.regime.strip()
    if kind_of(entry) in ("decode", "variants", "serving"):
        assert entry.model == "embedded" or (SHAPES / f"{entry.model}.json").is_file()
        for system in entry.systems.values():
            assert not isinstance(system, Afd) or system.transport in ("auto", *TRANSPORTS)


@pytest.mark.parametrize(
    ("name", "context", "batch", "baseline"),
    [
        ("qwen3-235b-8k", 8192, 96, 64),
        ("qwen3-235b-16k", 16384, 48, 32),
        ("minimax-m2.5-8k", 8192, 72, 48),
        ("minimax-m2.5-16k", 16384, 36, 24),
    ],
)
def test_fastafds_presets_have_its_figures(
    name: str, context: int, batch: int, baseline: int
) -> None:
    for ratio in range(1, 8):
        entry = SHIPPED[f"fastafd-{name}-{ratio}to1"]
        assert isinstance(entry, Decode)
        assert (entry.context, entry.batch) == (context, batch)
        assert entry.systems["ep4"].batch == baseline
        afd = entry.systems["afd"]
        assert isinstance(afd, Afd)
        assert (afd.attention_ranks, afd.ffn_ranks) == (4 * ratio, 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"contxt": 8}, "contxt"),
        ({"context": "8"}, r"\$\.context"),
        ({"context": 0}, "context"),
        ({"rounds": 0}, "rounds"),
        ({"kind": "spec"}, "spec"),
        ({"baseline": "other"}, "baseline"),
        ({"ratios": ["3to1"]}, "ratios"),
        ({"output": 10}, "output"),
        ({"systems": {"stock": {"layout": "colocated", "lanes": 2}}}, "lanes"),
        ({"systems": {"stock": {"layout": "colocated", "ffn_ranks": 1}}}, "ffn_ranks"),
        ({"systems": {"stock": {"layout": "afd", "ffn_ranks": 0}}}, r"systems\.stock\.ffn_ranks"),
        ({"systems": {"stock": {"layout": "afd", "lanes": 3}}}, r"systems\.stock\.batch"),
        ({"systems": {"stock": {"layout": "colocated", "gpus": 3, "attention_dp": 2}}}, "divide"),
        (
            {
                "systems": {
                    "stock": {"layout": "afd", "ffn_ranks": 2, "emulated_attention_ranks": 3}
                }
            },
            "emulation",
        ),
        (
            {"systems": {"stock": {"layout": "afd", "emulated_ffn_ranks": 1}}},
            r"systems\.stock\.emulated_ffn_ranks: 1 is less than 2",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_file_and_key(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    file = written(tmp_path, **changes)
    with pytest.raises(BadConfiguration, match=says) as refused:
        load(file)
    assert str(file) in str(refused.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_bytes(msgspec.json.encode({k: v for k, v in GOOD.items() if k != "model"}))
    with pytest.raises(BadConfiguration, match="model"):
        load(file)


def test_emulated_ranks_serve_no_whole_requests(tmp_path: Path) -> None:
    load_ = {"kind": "serving", "input": 4, "output": 4, "requests": 4, "concurrency": 2}
    kept = {name: GOOD[name] for name in ("regime", "model", "baseline")}
    systems_ = {kept["baseline"]: {"layout": "afd", "emulated_attention_ranks": 3}}
    file = tmp_path / "some.json"
    file.write_bytes(msgspec.json.encode({**load_, **kept, "systems": systems_}))
    with pytest.raises(BadConfiguration, match="do not prefill"):
        load(file)


def test_ratios_stand_for_one_configuration_each(tmp_path: Path) -> None:
    found = load(written(tmp_path, ratios=["1:1", "3:2"]))
    ranks = {name: entry.systems["afd"].attention_ranks for name, entry in found.items()}
    assert ranks == {"some-1to1": 2, "some-3to2": 3}
    assert load(written(tmp_path)).keys() == {"some"}


def test_figures_are_shared_by_all_gpus_emulated_ones_too() -> None:
    assert Afd(attention_ranks=3, ffn_ranks=2, attention_tp=2).gpus == 10
    emulated = Afd(emulated_attention_ranks=12, emulated_ffn_ranks=4)
    assert (emulated.gpus, emulated.counted_ranks, emulated.ranks) == (16, 12, 1)
    assert Colocated(gpus=4, attention_dp=4).counted_ranks == 4


def line(system: Afd | Colocated, requests: int = 6) -> list[str]:
    return systems.command_line(system, MODEL, dtype="auto", requests=requests, common=["--x"])


def after(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def test_command_lines() -> None:
    afd = line(Afd(attention_ranks=2, lanes=2, args=["--y"]))
    assert after(afd, "--afd-attention-ranks") == "2"
    assert after(afd, "--afd-max-tokens-per-rank") == "3", "each lane has half of the requests"
    assert after(afd, "--max-running-requests") == "12"
    assert after(afd, "--afd-lanes") == "2"
    assert afd[-2:] == ["--x", "--y"]
    assert not any("emul" in flag or "graph" in flag for flag in afd)
    assert "--afd-lanes" not in line(Afd())
    emulated = line(Afd(emulated_attention_ranks=3, graphs=False))
    assert "--afd-emulation-is-not-the-model" in emulated
    assert "--cuda-graph-backend-decode=disabled" in emulated
    stock = line(Colocated(gpus=2, attention_dp=2, expert_parallel=2, exchange="deepep"))
    assert after(stock, "--moe-a2a-backend") == "deepep"
    assert after(stock, "--ep-size") == "2"
    assert "--enable-dp-attention" in stock
    assert not any(flag.startswith("--afd") for flag in stock)
    tensor = line(Colocated(gpus=2))
    assert after(tensor, "--max-running-requests") == "6"
    assert "--enable-dp-attention" not in tensor


def test_shapes_can_be_changed_and_checkpoints_cannot(tmp_path: Path) -> None:
    model = prepare("qwen3-30b-a3b", {"num_hidden_layers": 2, "vocab_size": 50}, tmp_path)
    config = msgspec.json.decode((model.folder / "config.json").read_bytes())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 2048)
    assert model.flags == ("--load-format", "dummy")
    with pytest.raises(NoModel, match="num_layers"):
        prepare("qwen3-30b-a3b", {"num_layers": 2}, tmp_path)
    with pytest.raises(NoModel, match="checkpoint"):
        prepare("embedded", {"num_hidden_layers": 2}, tmp_path)
    with pytest.raises(NoModel, match="qwen3-235b-a22b-fp8"):
        prepare("nothing", {}, tmp_path)
    assert prepare("embedded", {}, tmp_path).vocabulary == 2048


@pytest.mark.parametrize("kind", KINDS)
def test_list_shows_a_kind_or_that_it_has_none(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["list", "--kind", kind]) == 0
    said = capsys.readouterr().out
    assert ("no configuration yet" in said) == (kind in ("spec", "cad"))
    own = [name for name, entry in SHIPPED.items() if kind_of(entry) == kind]
    assert all(f"| {name} |" in said for name in own)


def test_what_was_never_run_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    run = {entry.name for _, entry in look([RESULTS]).records}
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    presets = [line for line in lines if "| fastafd-" in line]
    assert len(presets) == 7 * 7
    for line in presets:
        assert line.endswith("not run |") == (line.split()[1] not in run), line


def test_a_configuration_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["run", "fastafd-minimax"])
    assert ended.value.code == 2
    assert "fastafd-minimax-m2.5-16k-1to1" in capsys.readouterr().err


def test_the_baseline_cannot_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["run", "cpu-embedded", "--systems", "2A1F"])
    assert "stock" in capsys.readouterr().err


def test_every_option_is_explained() -> None:
    [commands] = (a for a in command.parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert set(commands.choices) == {"list", "run", "compare", "table", "prompts", "pair"}
    for name, own in commands.choices.items():
        assert own.description, name
        assert all(action.help for action in own._actions), name


def test_the_documents_example_is_a_configuration(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    [example] = re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)
    file = tmp_path / "example.yaml"
    file.write_text(example)
    assert set(load(file)["example"].compared()) == {"megamoe", "1A1F"}
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", document))
    [commands] = (a for a in command.parser()._actions if isinstance(a, argparse._SubParsersAction))
    server = argparse.ArgumentParser()
    add_flags(server)
    parsers = [server, *commands.choices.values()]
    known = {o for p in parsers for a in p._actions for o in a.option_strings}
    assert flags - known == {"--decode-log-interval"}
