"""``python -m sglang_afd.plan``: speed, output, refusals, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_afd.plan import calibrate, command
from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.profile import profile_of, read_profile, shipped, write_profile
from tests.support.processes import children_seconds

pytestmark = pytest.mark.unit

ASK = ["--model-path", "qwen3-30b-a3b", "--gpus", "8", "--context", "8192"]
MODELS = (
    *("qwen3-30b-a3b", "qwen3-235b-a22b-fp8", "minimax-m2.5", "qwen3.5-397b-a17b"),
    "deepseek-v3",
)


@pytest.mark.parametrize("model", MODELS)
def test_answers_in_five_seconds_without_sglang_and_torch(model: str) -> None:
    """As a fresh process, its imports included."""
    config = Path(command.__file__).with_name("models") / f"{model}.json"
    code = (
        "import sys; from sglang_afd.plan.command import main; "
        f"status = main(['--model-path', {str(config)!r}, '--gpus', '8', '--gpu', 'h200', "
        "'--context', '8192', '--launch']); "
        "assert not {'torch', 'sglang', 'matplotlib'} & set(sys.modules); sys.exit(status)"
    )
    began = children_seconds()
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    assert children_seconds() - began < 5
    assert "tokens/s/GPU" in found.stdout and "launch_server" in found.stdout


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*ASK, "--json", "--rate", "2", "--launch"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["choice"]["layout"] in {row["layout"] for row in found["layouts"]}
    assert found["latencies"]["goodput"] <= 1
    assert {row["name"] for row in found["refused"]} >= {"5A3F"}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plan.{suffix}"
    assert command.main([*ASK, "--plot", str(file)]) == 0
    assert file.stat().st_size > 10_000
    if suffix == "png":
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "-3"], "--gpus"),
        (["--gpus", "999999999"], "--gpus"),
        (["--context", "0"], "--context"),
        (["--context", str(10**15)], "--context"),
        (["--context", "90000000"], "fit no layout"),
        (["--output", "-1"], "--output"),
        (["--tpot-ms", "0"], "--tpot-ms"),
        (["--tpot-ms", "nan"], "--tpot-ms"),
        (["--lanes", "0"], "--lanes"),
        (["--lanes", "99"], "--lanes"),
        (["--kv-bytes", "3"], "--kv-bytes"),
        (["--skew", "-1"], "skew"),
        (["--skew", "inf"], "skew"),
        (["--verify-width", "0"], "--verify-width"),
        (["--accepted", "2"], "--accepted"),
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--output", "0"], "--output"),
        (["--rows", "0"], "--rows"),
        (["--seed", "-1"], "--seed"),
        (["--domain", "0"], "--domain"),
        (["--gpu", "abacus"], "--gpu"),
        (["--plot", "plan.gif"], "--plot"),
        (["--plot", "/nowhere/plan.png"], "--plot"),
        (["--model-path", "/nowhere/config.json"], "--model-path"),
    ],
)
def test_one_error_line_names_the_field(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*ASK, *flags]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert "calibrate" in text and "docs/planner.md" in text


def test_as_built_has_no_lanes_that_are_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*ASK, "--as-built", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    from sglang_afd.plan.modes import contract

    served = {*contract("sync").lanes, *contract("async").lanes}
    assert {row["lanes"] for row in found["layouts"]} <= served
    assert {row["kind"] for row in found["layouts"]} <= {"colocated", "afd"}


def test_shipped_profiles_are_sourced_and_marked() -> None:
    assert set(shipped()) == {"h200", "h100", "b200", "gb200"}
    for name in shipped():
        profile = read_profile(name)
        assert profile.measured == (name == "h200")
        assert all(profile.sources.values())


def test_profile_round_trip(tmp_path: Path) -> None:
    profile = read_profile("gb200")
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(str(tmp_path / "p.json")) == profile


@pytest.mark.parametrize("value", [None, "x", -1, 0, float("nan"), 2e30])
def test_a_wrong_figure_is_refused_by_name(value: object) -> None:
    found = {"name": "x", "figures": {"bandwidth": [value, "s"]}}
    full = json.loads((Path(command.__file__).with_name("profiles") / "h200.json").read_text())
    full["figures"] |= found["figures"]  # type: ignore[operator]
    with pytest.raises(PlanError, match="bandwidth"):
        profile_of(full)


def test_calibrate_refuses_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", without)
    assert command.main(["calibrate", "--out", str(tmp_path / "p.json")]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert command.main(["calibrate", "--out", "/nowhere/p.json"]) == 2
    assert "--out" in capsys.readouterr().err


def test_calibrate_measures_every_kernel_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement once, small and on the CPU: their tensors fit each other."""
    import torch

    def timed(torch: object, launch: Callable[[], object], launches: int = 1) -> float:
        launch()
        return 1e-3

    for name, value in (
        ("_DEVICE", "cpu"),
        ("_COPIED", 2**10),
        ("_HIDDEN", 32),
        ("_INTERMEDIATE", 16),
        ("_MANY_ROWS", 64),
        ("_CONTEXT", 64),
        ("_timed", timed),
    ):
        monkeypatch.setattr(calibrate, name, value)
    found = calibrate._one_gpu(torch, read_profile("h200"))
    assert set(found) == {
        *("bandwidth", "kernel_seconds", "gemm_efficiency", "math_efficiency"),
        *("grouped_efficiency", "attention_efficiency"),
    }
    assert found["grouped_efficiency"].value == 32 * 32 * 32 * 2 / 1e-3 / 4.8e12
    calibrate.merged(read_profile("h200"), found, name="mine", memory=8e10)


def test_measured_figures_replace_the_base_and_say_so() -> None:
    found = {"gemm_efficiency": calibrate.Measured(0.7, "a GEMM")}
    merged = calibrate.merged(read_profile("h100"), found, name="mine", memory=8e10)
    assert merged.gemm_efficiency == 0.7 and merged.sources["gemm_efficiency"] == "measured: a GEMM"
    assert merged.link == read_profile("h100").link and "h100's" in merged.sources["link"]
    with pytest.raises(PlanError, match="kernel_seconds"):
        wrong = {"kernel_seconds": calibrate.Measured(-1.0, "broken")}
        calibrate.merged(read_profile("h100"), wrong, name="mine", memory=8e10)
