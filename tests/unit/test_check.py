"""What runs the gates: the check command and the launcher; and the look at the machine."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from sglang_afd import check, start
from sglang_afd.gate import GATES, Finding
from sglang_afd.machine import Gpu, Machine, visible
from sglang_afd.running import free_port
from tests.support.gate_facts import ONE_OF_EACH, write_model


def test_visible_devices() -> None:
    gpus = [Gpu(str(n), (9, 0), f"GPU-{n}abc") for n in range(4)]
    names = {
        None: "0123",
        "": "",
        "-1": "",
        "2,0": "20",
        "1,9,2": "1",
        "GPU-3a,1": "31",
        "GPU-": "",
        "0, 1": "01",
    }
    for selection, expected in names.items():
        environment = {} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}
        assert "".join(gpu.name for gpu in visible(gpus, environment)) == expected


def test_looking_at_the_machine_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sglang_afd.machine import this_machine; this_machine(); "
        "import sglang_afd.check; "
        "print([m for m in ('torch', 'sglang', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def run_check(*argv: str) -> tuple[int, str]:
    """Exit status and output of ``sglang_afd.check``."""
    output = StringIO()
    with redirect_stdout(output):
        status = check.main(argv)
    return status, output.getvalue()


def test_check_prints_every_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "this_machine", Machine)
    argv = ("--model-path", str(write_model(tmp_path)), "--port", str(free_port()), *ONE_OF_EACH)
    status, text = run_check(*argv)
    assert status == 0
    assert text.count("  pass  ") == len(GATES) and "FAIL" not in text
    status, text = run_check(*argv, "--afd-ffn-ranks", "3", "--enable-lora")
    assert status == 1
    assert text.count("  pass  ") == len(GATES) - 2 and text.count("  FAIL  ") == 2
    assert "mend: choose a product out of 1, 2, 4, 8, 16" in text
    assert "mend: merge the adapter into the checkpoint" in text


def test_check_draws_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    check._print_table([Finding("model", True, "fine"), Finding("addresses", False, "[::1]", "x")])
    drawn = capsys.readouterr().out
    assert "pass" in drawn and "FAIL" in drawn and "[::1]" in drawn


def test_check_needs_a_deployment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check.main(["--model-path", "x"])
    assert end.value.code == 2
    assert "there is nothing to check" in capsys.readouterr().err


def test_launcher_refuses_what_the_gates_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "this_machine", Machine)
    environment = dict(start.os.environ)
    argv = ["--model-path", str(write_model(tmp_path)), "--port", str(free_port()), *ONE_OF_EACH]
    with pytest.raises(SystemExit) as end:
        start.prepare([*argv, "--afd-ffn-ranks", "3", "--enable-lora"], program="launch_server")
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("launch_server: error: topology: 16 experts do not divide")
    assert "execution mode: --enable-lora asks for LoRA" in error
    assert dict(start.os.environ) == environment, "a refused start must leave no trace"


def test_refusal_is_quick(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sglang_afd.launch_server", *ONE_OF_EACH]
    command += ["--model-path", str(tmp_path / "nowhere"), "--device", "cpu"]
    begin = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True)
    assert time.monotonic() - begin < 30  # a second on a machine with nothing else to do
    assert run.returncode == 2
    assert run.stderr.startswith("launch_server: error: model: there is no directory")
    assert len(run.stderr.splitlines()) == 1 and not run.stdout
