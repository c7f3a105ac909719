"""Roles under profilers: the commands they become, and their common end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from sglang_afd import flags, launch_server, on_nsys, start
from sglang_afd.causes import INTERRUPTED
from sglang_afd.flags import NSYS
from sglang_afd.machine import Machine
from sglang_afd.on_nsys import OPTIONS, role_commands, supervise, take
from sglang_afd.topology import Role
from tests.support import nsys
from tests.support.gate_facts import ONE_OF_EACH, make_facts, refused, write_model

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

SERVES = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); time.sleep(100)"
HANGS = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)"
FAILS = "import time; time.sleep(1); raise SystemExit(3)"


def test_take() -> None:
    assert take([*ONE_OF_EACH, NSYS, "reports"]) == (Path("reports"), list(ONE_OF_EACH))
    assert take(ONE_OF_EACH) == (None, list(ONE_OF_EACH))


def test_both_roles_become_commands_of_their_own() -> None:
    command = flags.parse(ONE_OF_EACH, transport="nvlink")
    assert command.config is not None
    made = role_commands(command.config, [*ONE_OF_EACH, "--port", "31000"])
    assert list(made) == [Role.ATTENTION, Role.FFN]
    for rank, (role, line) in enumerate(made.items()):
        parsed = flags.parse(line[3:], transport="gloo").config
        assert parsed is not None
        assert parsed.command_role is role and parsed.transport == "nvlink"
        assert line[line.index("--node-rank") + 1] == str(rank)
    one, other = (line[line.index("--dist-init-addr") + 1] for line in made.values())
    assert one == other
    assert made[Role.FFN][-2] == "--port" and made[Role.FFN][-1] != "31000"


def test_a_role_s_command_stays_one() -> None:
    given = [*ONE_OF_EACH, "--afd-role", "ffn", "--nnodes", "2", "--node-rank", "1"]
    given += ["--dist-init-addr", "127.0.0.1:25000"]
    command = flags.parse(given, transport="gloo")
    assert command.config is not None
    [(role, line)] = role_commands(command.config, given).items()
    assert role is Role.FFN and line[3:] == given


def test_without_nsys_the_gate_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "this_machine", Machine)
    model = write_model(tmp_path / "model")
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["--model-path", str(model), *ONE_OF_EACH, NSYS, str(tmp_path / "reports")]
    facts = start.read_facts(argv, program="check")
    assert facts is not None
    [refusal] = refused(facts, "execution mode")
    assert "nsys is not on the PATH" in refusal and "nsight-systems-cli" in refusal
    with pytest.raises(SystemExit) as end:
        launch_server.main(argv)
    assert end.value.code == 2 and not (tmp_path / "reports").exists()
    monkeypatch.setenv("PATH", str(nsys.install(tmp_path / "bin")))
    facts = start.read_facts(argv, program="check")
    assert facts is not None and not refused(facts, "execution mode")
    assert not refused(make_facts(model), "execution mode")


@pytest.mark.parametrize("other", [("--afd-restart", "1"), ("--afd-ray",)])
def test_it_goes_with_no_other_supervisor(
    other: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        launch_server.main([*ONE_OF_EACH, NSYS, "reports", *other])
    assert end.value.code == 2 and "leave it out" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No FFN command ends here because the attention command has."""
    monkeypatch.setattr(on_nsys, "_STOP_WITHIN", 2.0)


@pytest.fixture(params=[True, False], ids=["exec", "child"])
def profiler(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The stand-in's program: the command itself, or its parent."""
    return str(nsys.install(tmp_path / "bin", execs=request.param) / "nsys")


def commands(profiler: str, folder: Path, attention: str, ffn: str) -> dict[Role, list[str]]:
    codes = {Role.ATTENTION: attention, Role.FFN: ffn}
    return {
        role: [profiler, "profile", *OPTIONS, f"--output={folder / role.value}", *line]
        for role, code in codes.items()
        for line in ([sys.executable, "-c", code],)
    }


def below() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]


def signals(*numbers: int, every: float = 3.0) -> threading.Thread:
    """Send this process these signals, one after the other."""

    def send() -> None:
        for number in numbers:
            time.sleep(every)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)])
def test_a_signal_ends_both(profiler: str, tmp_path: Path, sign: int, status: int) -> None:
    sent = signals(sign)
    asked = commands(profiler, tmp_path, SERVES, SERVES)
    assert supervise(asked, "launch_server") == status
    sent.join()
    assert not below()
    for role in asked:
        found = nsys.recorded(tmp_path / role.value)
        assert found["verb"] == "profile" and set(OPTIONS) <= set(found["options"])
        assert found["command"] == [sys.executable, "-c", SERVES]
    if "False" in Path(profiler).read_text():
        assert len(list(tmp_path.glob("*.nsys-rep"))) == 2, "both reports are written"


def test_the_first_that_fails_ends_the_other(
    profiler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for codes in ((FAILS, SERVES), (SERVES, FAILS)):
        assert supervise(commands(profiler, tmp_path, *codes), "launch_server") == 3
        assert not below()
    said = capsys.readouterr().err
    assert "the attention command ended with 3" in said and "the ffn command ended with 3" in said


def test_what_hangs_is_killed(profiler: str, tmp_path: Path) -> None:
    sent = signals(signal.SIGTERM)
    assert supervise(commands(profiler, tmp_path, HANGS, SERVES), "launch_server") == 1
    sent.join()
    assert not below()


def test_a_second_signal_ends_at_once(profiler: str, tmp_path: Path) -> None:
    sent = signals(signal.SIGINT, signal.SIGINT)
    began = time.monotonic()
    assert supervise(commands(profiler, tmp_path, HANGS, HANGS), "launch_server") == INTERRUPTED
    sent.join()
    assert time.monotonic() - began < 30 and not below()
