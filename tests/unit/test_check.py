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
from sglang_afd.upstream import server
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


@pytest.fixture
def sglang_says(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What SGLang's parser, which takes seconds to import, complains of under ``error``."""
    says: dict[str, str] = {}

    def parse(args: object) -> None:
        if says:
            raise server.FlagError(says["error"])

    monkeypatch.setattr(server, "parse", parse)
    monkeypatch.setattr(start, "_set_cpu_environment", lambda *args: None)
    return says


def run_check(*argv: str) -> tuple[int, str]:
    """Exit status and output of ``sglang_afd.check``."""
    output = StringIO()
    with redirect_stdout(output):
        status = check.main(argv)
    return status, output.getvalue()


def test_check_prints_every_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang_says: dict[str, str]
) -> None:
    monkeypatch.setattr(start, "this_machine", Machine)
    argv = ("--model-path", str(write_model(tmp_path)), "--port", str(free_port()), *ONE_OF_EACH)
    status, text = run_check(*argv)
    assert status == 0
    assert text.count("  pass  ") == len(GATES) + 1 and "FAIL" not in text
    status, text = run_check(*argv, "--afd-ffn-ranks", "3", "--enable-lora")
    assert status == 1
    assert text.count("  pass  ") == len(GATES) - 1 and text.count("  FAIL  ") == 2
    assert "mend: choose a product out of 1, 2, 4, 8, 16" in text
    assert "mend: merge the adapter into the checkpoint" in text
    sglang_says["error"] = "unrecognized arguments: --foo"
    status, text = run_check(*argv)
    assert status == 1
    assert "SGLang's flags  FAIL  unrecognized arguments: --foo" in text


def test_flags_that_sglang_does_not_take_are_one_line(tmp_path: Path) -> None:
    """Its own parser decides, and its usage, hundreds of lines, is not shown."""
    model = ("--model-path", str(write_model(tmp_path)), "--device", "cpu")
    flags = [*model, "--port", str(free_port()), *ONE_OF_EACH]
    code = (
        "import sys; from sglang_afd import check, launch_server\n"
        "def end(main, *argv):\n"
        "    try: return main(argv)\n"
        "    except SystemExit as end: return end.code\n"
        "flags = sys.argv[1:]\n"
        "print(end(check.main, *flags, '--foo', '1'))\n"
        "print(end(check.main, *flags, '--page-size', 'x'))\n"
        "print(end(launch_server.main, *flags, '--page-size', 'x'))\n"
        "print(end(launch_server.main, *flags[:4], '--bar', '1'))"
    )
    run = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True)
    assert "SGLang's flags  FAIL  unrecognized arguments: --foo 1" in run.stdout
    assert "SGLang's flags  FAIL  argument --page-size: invalid int value: 'x'" in run.stdout
    lines = run.stdout.splitlines()
    assert (lines.count("1"), lines.count("2")) == (2, 2), run.stdout
    errors = [line for line in run.stderr.splitlines() if "error: " in line]
    assert errors == [
        "launch_server: error: argument --page-size: invalid int value: 'x'; see --help",
        "launch_server: error: unrecognized arguments: --bar 1; see --help",
    ]
    assert "usage" not in run.stderr


def test_help_shows_our_flags_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "add_sglang_flags", lambda parser: parser.add_argument("--theirs"))
    monkeypatch.setenv("SGLANG_AFD_CPU", "1")
    with pytest.raises(SystemExit) as end:
        start.prepare(["--help"], program="launch_server")
    assert end.value.code == 0
    text = capsys.readouterr().out
    usage, description, ours = text.split("\n\n")[:3]
    assert usage.startswith("usage: python -m sglang_afd.launch_server") and len(usage) < 200
    assert "--model-path is optional" in description and "embedded" in description
    assert ours.startswith("attention-FFN disaggregation:")
    assert text.index("--afd-role") < text.index("--theirs")
    assert text.count("usage:") == 1


@pytest.mark.parametrize("module", ["launch_server", "check", "demo", "features"])
def test_a_missing_dependency_is_one_line(module: str) -> None:
    """As with the system's Python in place of .venv's."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-S", "-m", f"sglang_afd.{module}"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, env={})
    assert run.returncode == 1 and not run.stdout
    [line] = run.stderr.splitlines()
    assert "has no package msgspec; run `make setup`, then `source .venv/bin/activate`" in line


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
