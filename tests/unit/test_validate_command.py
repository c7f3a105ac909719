"""The validator's command line: what it makes of flags, and what it refuses at once."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_afd import embedded
from sglang_afd.identity import checkpoint_content
from sglang_afd.validate import __main__ as command
from sglang_afd.validate import environment, hf_worker, presets, run
from sglang_afd.validate.command import Impossible, parser, resolve
from sglang_afd.validate.prompts import SETS
from sglang_afd.validate.settings import Settings
from sglang_afd.validate.sides import SideFailed, redacted, software_of
from sglang_afd.validation.report import read

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "sglang_afd" / "validate"


def settle(tmp_path: Path, *argv: str) -> Settings:
    own, rest = parser().parse_known_args(["--new-tokens", "8", *argv])
    return resolve(own, [*rest, "--device", "cpu"], tmp_path, program="validate")


def test_without_flags_the_embedded_model_in_float32(tmp_path: Path) -> None:
    made = settle(tmp_path)
    assert made.model == made.reference_model == embedded.path()
    assert made.layout == "1A1F over gloo"
    assert made.reference == "hf" and made.thresholds.precision == "float32"
    assert made.candidate_args[-4:-2] == ("--dtype", "float32")
    assert made.prompts.name == "mixed" and made.record and made.on_cpu


def test_flags_of_the_deployment_are_passed_on(tmp_path: Path) -> None:
    flags = ["--afd-attention-ranks", "2", "--afd-ffn-ranks", "3", "--chunked-prefill-size=64"]
    made = settle(tmp_path, *flags, "--reference", "sglang", "--reference-args", "--tp-size 2")
    assert made.layout == "2A3F over gloo"
    assert list(made.candidate_args[:5]) == flags
    assert made.reference_args == ("--tp-size", "2")


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("auto", "bfloat16"), ("half", "bfloat16")],
)
def test_thresholds_are_the_precisions(dtype: str, precision: str, tmp_path: Path) -> None:
    assert settle(tmp_path, "--dtype", dtype).thresholds.precision == precision


@pytest.mark.parametrize(("replayed", "rows"), [(False, 12), (True, 9)])
def test_replayed_steps_record_no_row(replayed: bool, rows: int, tmp_path: Path) -> None:
    made = settle(tmp_path)
    assert not made.replayed, "no step is, on the CPU"
    settings = dataclasses.replace(made, replayed=replayed)
    assert settings.recorded_rows(9, made=3) == rows


def test_prompts_are_cut_to_what_a_request_may_have(tmp_path: Path) -> None:
    made = settle(tmp_path, "--prompts", "long", "--context-length", "2000")
    assert max(map(len, made.prompts.prompts)) == 2000 - 8 - 2
    made = settle(tmp_path, "--prompts", "long", "--max-total-tokens", "1500")
    assert max(map(len, made.prompts.prompts)) == 1500 - 8 - 2


def test_emulated_attention_ranks_stand_in_the_layout(tmp_path: Path) -> None:
    """The real rank's answers are the model's, so they may be compared."""
    one = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")
    emulated = ("--afd-emulate-attention-ranks", "3", "--afd-emulation-is-not-the-model")
    assert settle(tmp_path, *one, *emulated).layout == "1A1F over gloo, measured as 3A1F"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--refrence", "sglang"], "--reference is meant"),
        (["chek", "report.json"], "chek is no flag"),
        (["--out", "/none/report.json"], "there is no folder /none"),
        (["--new-tokens", "0"], "leaves no room"),
        (["--reference", "vllm"], "--reference vllm is none"),
        (["--reference-args", "--tp-size 2"], "the reference sglang's"),
        (["--reference-python", "/none"], "is no program"),
        (["--prompts", "shrot"], "no set of prompts"),
        (["--new-tokens", "5000"], "leaves no room"),
        (["--load-format", "dummy"], "random weights"),
        (["--afd-attention-ranks", "1", "--afd-ffn-ranks", "5"], "12 experts do not divide"),
        (
            ["--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", "--afd-role", "ffn",
             "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "127.0.0.1:25000"],
            "--afd-role starts a part",
        ),
        (
            ["--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", "--afd-emulate-ffn-ranks", "2",
             "--afd-emulation-is-not-the-model"],
            "leaves experts out",
        ),
        (["--max-total-tokens", "many"], "must be an integer"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_at_once(
    flags: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(Impossible, match=says):
        settle(tmp_path, *flags)


@pytest.mark.parametrize("flags", [["--plot", "plot.gif"], ["--plot", "/none/plot.png"]])
def test_a_plot_that_cannot_be_drawn_is_refused_at_once(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(flags)
    assert end.value.code == 2 and "--plot" in capsys.readouterr().err


def test_a_deployment_that_cannot_be_right_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--afd-attention-ranks", "0", "--afd-ffn-ranks", "1", "--work", str(tmp_path / "new")]
    with pytest.raises(SystemExit) as end:
        command.main(argv)
    assert end.value.code == 2 and "--afd-attention-ranks is 0" in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir())


def test_a_refusal_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--prompts", "shrot", "--device", "cpu", "--work", str(tmp_path)])
    assert end.value.code == 2
    assert "validate: error: --prompts shrot" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """The embedded model, one bit of it changed."""
    target = tmp_path / "other"
    target.mkdir()
    for file in embedded.path().iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[-1] ^= 1
        (target / file.name).write_bytes(content)
    return target


@pytest.mark.parametrize("reference", ["hf", "sglang"])
def test_another_checkpoint_fails_before_anything_starts(
    reference: str, other_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing may start")

    monkeypatch.setattr(run.references, "answer", never)
    flags = ["--reference", reference, "--reference-model-path", str(other_model)]
    out = tmp_path / "report.json"
    argv = [*flags, "--device", "cpu", "--work", str(tmp_path), "--out", str(out)]
    assert command.main(argv) == 1
    found = read(out)
    assert "different checkpoints (model.safetensors)" in found.reasons[0]
    assert command.main(["check", str(out)]) == 1


def test_a_folder_without_a_checkpoint_is_another_one(tmp_path: Path) -> None:
    out, empty = tmp_path / "report.json", tmp_path / "empty"
    empty.mkdir()
    argv = ["--reference-model-path", str(empty), "--device", "cpu", "--out", str(out)]
    assert command.main([*argv, "--work", str(tmp_path)]) == 1
    assert "different checkpoints (config.json, model.safetensors)" in read(out).reasons[0]


def test_a_work_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--work", "/proc/none"])
    assert end.value.code == 2 and "--work /proc/none cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_side_that_does_not_start_is_a_failure_of_its_own(
    side: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise SideFailed(side, "it ended with 1")

    monkeypatch.setattr(run.references, "answer", fails)
    out = tmp_path / "report.json"
    assert command.main(["--device", "cpu", "--work", str(tmp_path), "--out", str(out)]) == 1
    assert f"{side}: it ended with 1" in read(out).reasons


def test_the_content_of_a_checkpoint_shows_one_bit(other_model: Path) -> None:
    own, other = checkpoint_content(embedded.path()), checkpoint_content(other_model)
    assert sorted(own) == ["config.json", "model.safetensors"]
    assert own["config.json"] == other["config.json"]
    assert own["model.safetensors"] != other["model.safetensors"]


def test_a_file_in_the_hubs_cache_is_named_by_its_hash(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert checkpoint_content(tmp_path) == {"model.safetensors": "ab" * 32}


@pytest.mark.parametrize("name", presets.names())
def test_presets_are_marked_unrun(name: str) -> None:
    preset = presets.load(name)
    assert preset.status == "unrun" and preset.prompts in SETS
    assert preset.args[:1] == ["--model-path"] and "--afd-ffn-ranks" in preset.args


def test_a_presets_flags_yield_to_given_ones(tmp_path: Path) -> None:
    model = ["--model-path", str(embedded.path()), "--afd-ffn-ranks", "2"]
    made = settle(tmp_path, "--preset", "qwen3-30b-a3b", *model)
    assert made.reference == "sglang" and made.layout == "1A2F over gloo"
    assert made.model == embedded.path()


def test_the_environment_is_named_from_outside_as_from_inside() -> None:
    found = software_of(sys.executable)
    own = environment.describe()
    for key in ("packages", "all_packages_sha256", "sources", "extensions_sha256", "gpus"):
        assert found[key] == own[key]
    assert found["packages"]["sglang"] == "0.5.23"
    assert {"files_sha256"} <= set(found["sources"]["sglang"])
    assert re.fullmatch("[0-9a-f]{40}", found["sources"]["sglang_afd"]["commit"])
    assert re.fullmatch("[0-9a-f]{64}", found["sources"]["sglang_afd"]["diff_sha256"])
    assert found["extensions_sha256"], "SGLang has compiled files"


def test_changes_of_the_checkout_change_the_identity(tmp_path: Path) -> None:
    import subprocess

    package = tmp_path / "probed_package"
    package.mkdir()
    (package / "__init__.py").write_text("")

    def git(*args: str) -> None:
        config = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *config, *args], check=True, timeout=30)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    sys.path.insert(0, str(tmp_path))
    try:
        clean = environment._source("probed_package")
        (tmp_path / "new.py").write_text("x = 1")
        new_file = environment._source("probed_package")
        (package / "__init__.py").write_text("y = 1")
        edited = environment._source("probed_package")
    finally:
        sys.path.remove(str(tmp_path))
    assert clean is not None and new_file is not None and edited is not None
    assert clean["commit"] == edited["commit"]
    assert len({clean["diff_sha256"], new_file["diff_sha256"], edited["diff_sha256"]}) == 3
    assert clean["files_sha256"] != edited["files_sha256"]


def test_secrets_stay_out_of_the_report() -> None:
    args = ["--api-key", "s3cret", "--admin-api-key=s3cret", "--max-total-tokens", "9"]
    assert redacted(args) == ["--api-key", "***", "--admin-api-key=***", *args[3:]]


def test_the_worker_needs_no_package_of_ours() -> None:
    """It runs in an environment that has only what its requirements file names."""
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "safetensors"}
    for name in ("hf_worker.py", "environment.py"):
        for node in ast.walk(ast.parse((FOLDER / name).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {found.partition(".")[0] for found in names} <= allowed, name


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts", "3"),
        ("model.language_model.layers.12.mlp.experts", "12"),
        ("model.layers.3.mlp.shared_experts", None),
        ("model.layers.3.mlp.experts.0", None),
        ("model.layers.3.mlp.gate", None),
    ],
)
def test_only_routed_experts_are_recorded_of_transformers(name: str, layer: str | None) -> None:
    match = hf_worker._EXPERTS.fullmatch(name)
    assert (match and match[1]) == layer


def test_the_references_requirements_are_locked_by_hash() -> None:
    text = (FOLDER / "reference-requirements.txt").read_text()
    body = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    locked: dict[str, str] = {}
    for entry in body.replace("\\\n", " ").splitlines():
        name, version = entry.split()[0].split("==")
        locked[name] = version
        hashes = entry.split()[1:]
        assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", h) for h in hashes), entry
    assert {"torch", "transformers", "safetensors", "accelerate"} <= set(locked)
    pinned = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    pinned |= {"accelerate": locked["accelerate"]}
    assert {name: pinned.get(name) for name in locked} == locked


def test_the_report_is_a_schema() -> None:
    """Every field of every part is required or has a default; unknown ones are refused."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b"{}", type=command.Report)
