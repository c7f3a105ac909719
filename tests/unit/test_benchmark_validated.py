"""The rows that validate two GPUs: each passes the gates, and what has passed is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import validated
from benchmarks.validated import ROWS, Row
from sglang_afd import embedded, start
from sglang_afd.machine import Machine
from sglang_afd.validate.command import parser, resolve
from sglang_afd.validation import report
from tests.support import validation_reports
from tests.support.gate_facts import FP8, H200, write_model

pytestmark = pytest.mark.unit

TWO_GPUS = Machine((H200, H200), frozenset({"deep_ep", "deep_gemm"}))
WRONG = [validation_reports.result(0), validation_reports.result(1, ranks=[1, 9])]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_a_validation_that_two_gpus_can_run(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "this_machine", lambda: TWO_GPUS)
    quantised = {"quantization_config": FP8} if row.dtype == "fp8" else {}
    vocab = json.loads((embedded.path() / "config.json").read_text())["vocab_size"]
    changes = {"max_position_embeddings": 4096, "vocab_size": vocab, **quantised}
    model = write_model(tmp_path / "model", **changes)
    shutil.copy(embedded.path() / "tokenizer.json", model)
    _, _, module, *argv = row.command(model, tmp_path, tmp_path)
    assert module == "sglang_afd.validate"
    own, passed_on = parser().parse_known_args(argv)
    made = resolve(own, passed_on, tmp_path, program="validate")
    assert made.thresholds.precision == {"bf16": "bfloat16", "fp8": "fp8"}[row.dtype]
    assert made.layout == f"1A1F over {row.transport}" + (", 2 lanes" if row.lanes == 2 else "")
    assert made.replayed == (row.transport == "nvlink") and not made.on_cpu
    assert len(made.prompts.prompts) <= validated.ROWS_A_STEP, "all fit one exchange"


def test_the_rows_are_those_that_must_be_shown() -> None:
    assert {(row.dtype, row.transport) for row in ROWS} == {
        (dtype, transport) for dtype in ("bf16", "fp8") for transport in ("nvlink", "deepep")
    }
    assert {(row.dtype, row.lanes) for row in ROWS if row.transport == "nvlink"} == {
        (dtype, lanes) for dtype in ("bf16", "fp8") for lanes in (1, 2)
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the rows that were run; each writes what `tmp_path`/answers has, or a pass."""
    names: list[str] = []

    def ran(command: list[str], **_: Any) -> Any:
        out = Path(command[command.index("--out") + 1])
        names.append(out.stem)
        answer = tmp_path / "answers" / out.name
        if answer.exists():
            out.write_text(answer.read_text())
        elif not answer.with_suffix(".none").exists():
            report.write(validation_reports.make(), out)

        class Done:
            returncode = 0

        return Done()

    monkeypatch.setattr(validated.subprocess, "run", ran)
    monkeypatch.setattr(validated, "checkpoints", lambda work: dict.fromkeys(("bf16", "fp8"), work))
    monkeypatch.setattr(validated, "share_kernels", lambda work: None)
    (tmp_path / "answers").mkdir()
    return names


def run(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    argv = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--at-once", "1"]
    status = validated.main([*argv, *more])
    return status, json.loads((tmp_path / "out" / "summary.json").read_text())


def test_all_rows_pass(asked: list[str], tmp_path: Path) -> None:
    status, found = run(tmp_path)
    assert status == 0 and asked == [row.name for row in ROWS]
    assert {entry["verdict"] for entry in found.values()} == {"pass"}
    assert found["bf16-nvlink-2"]["figures"]["top1_share"] == 1


def test_what_has_passed_is_not_run_again(asked: list[str], tmp_path: Path) -> None:
    report.write(validation_reports.make(results=WRONG), tmp_path / "answers" / "fp8-deepep-1.json")
    (tmp_path / "answers" / "bf16-nvlink-1.none").touch()
    status, found = run(tmp_path)
    assert status == 1
    assert found["fp8-deepep-1"]["verdict"] == "fail" and found["fp8-deepep-1"]["reasons"]
    assert found["bf16-nvlink-1"]["verdict"] == "none"
    del asked[:]
    for file in (tmp_path / "answers").iterdir():
        file.unlink()
    assert run(tmp_path)[0] == 0
    assert asked == ["fp8-deepep-1", "bf16-nvlink-1"]


def test_a_report_that_contradicts_itself_passes_nothing(asked: list[str], tmp_path: Path) -> None:
    made = validation_reports.make(results=WRONG)
    made.verdict = "pass"
    report.write(made, tmp_path / "answers" / "bf16-nvlink-2.json")
    status, found = run(tmp_path, "--rows", "bf16-nvlink-2")
    assert status == 1 and found["bf16-nvlink-2"]["verdict"] == "none"
