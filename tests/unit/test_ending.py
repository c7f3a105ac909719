"""A command ends with its cause as the last line, a status that means it, and no process left."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from sglang_afd.upstream import ending

pytestmark = pytest.mark.unit

BODIES = {
    "child-failed": "os.kill(os.getpid(), signal.SIGQUIT); time.sleep(60)",
    "error": "raise RuntimeError('the scheduler died')",
    "exit": "raise SystemExit(1)",
    "ctrl-c": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "good": "pass",
    "child-sees-ctrl-c": "interrupt(child)",
}
PROGRAM = """
import json, multiprocessing, os, signal, sys, tempfile, time
import psutil
from sglang.srt.utils import common
from sglang_afd import causes
from sglang_afd.upstream import ending
from sglang_afd.upstream.hooks import install

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
install([hook for hook in ending.HOOKS if hook.target.endswith(".kill_process_tree")])


def fail(*_):
    common.kill_process_tree(os.getpid())  # as SGLang does when a child has failed


def interrupt(child):
    os.kill(child.pid, signal.SIGINT)
    child.join(1)
    assert child.is_alive()


def command(body):
    with ending.ending("launch_server"):
        signal.signal(signal.SIGQUIT, fail)
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        ending._without_interrupts(child.start)
        print(child.pid, flush=True)
        causes.note("attention rank 0: lost a peer", consequence=True)
        causes.note("FFN rank 0: no memory")
        exec(body)


def left(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


for name, body in json.loads(sys.argv[1]).items():
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if not pid:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = 0
            try:
                command(body)
            except SystemExit as end:
                status = end.code
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0), err.seek(0)
        print("END", json.dumps([name, [status, err.read().splitlines(), left(int(out.read()))]]))
"""


class End(NamedTuple):
    """How a command has ended: its status, what it wrote to standard error, whether its child is
    still there."""

    status: int
    lines: list[str]
    child_left: bool


@pytest.fixture(scope="module")
def ends() -> dict[str, End]:
    """The ends of the commands with each of `BODIES`; SGLang is imported once for all."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(BODIES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("END ")]
    assert len(lines) == len(BODIES), done.stderr
    return {name: End(*rest) for name, rest in map(json.loads, lines)}


@pytest.mark.parametrize("body", ["child-failed", "error", "exit"])
def test_the_cause_is_the_last_line(ends: dict[str, End], body: str) -> None:
    end = ends[body]
    assert (end.status, end.child_left) == (1, False)
    assert end.lines[-1] == "launch_server: error: FFN rank 0: no memory", end.lines


def test_ctrl_c_is_quiet(ends: dict[str, End]) -> None:
    assert ends["ctrl-c"] == (130, [], False)


@pytest.mark.parametrize("body", ["good", "child-sees-ctrl-c"])
def test_a_good_end_says_nothing(ends: dict[str, End], body: str) -> None:
    assert ends[body] == (0, [], False)


def test_a_taken_http_port_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    noted: list[str] = []
    monkeypatch.setattr(ending.causes, "note", noted.append)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        serving = SimpleNamespace(host="127.0.0.1", port=port)
        monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
        with pytest.raises(SystemExit) as end:
            ending._check_http_port()
    assert end.value.code == 1
    assert noted[0].startswith(f"HTTP server: port {port} of 127.0.0.1 is taken by another")
    ending._check_http_port()


def test_a_port_that_was_taken_meanwhile_is_told_with_its_mend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import zmq

    noted: list[str] = []
    monkeypatch.setattr(ending.causes, "note", lambda text, consequence: noted.append(text))
    wrapped = {h.target.split(".")[-2] for h in ending.HOOKS if h.fn is ending._note_cause}
    assert wrapped >= {"Scheduler", "DataParallelController", "DetokenizerManager"}
    context = zmq.Context()
    with context.socket(zmq.PULL) as first, context.socket(zmq.PULL) as second:
        port = first.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(zmq.ZMQError):
            ending._note_cause(second.bind, f"tcp://127.0.0.1:{port}")
    [text] = noted
    assert f"127.0.0.1:{port}" in text and text.endswith("another port in --dist-init-addr)")
    assert "choose another --port" in text
