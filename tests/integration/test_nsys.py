"""``--afd-nsys`` with a stand-in profiler: a report for each role, and a clean end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from sglang_afd.on_nsys import OPTIONS
from tests.support import nsys
from tests.support.command import Command
from tests.support.processes import wait_until
from tests.support.reference import Expect, assert_equal
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

START = 500.0  # seconds: two commands that import SGLang
END_WITHIN = 90.0


@pytest.mark.parametrize("execs", [False, pytest.param(True, marks=pytest.mark.full)])
def test_each_role_is_profiled_and_all_end(expect: Expect, tmp_path: Path, execs: bool) -> None:
    path = f"{nsys.install(tmp_path / 'bin', execs=execs)}:{os.environ['PATH']}"
    reports = tmp_path / "reports"
    argv = ["--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", "--dtype", "float32"]
    argv += ["--device", "cpu", "--afd-nsys", str(reports)]
    world = World(Command(), argv, tmp_path / "server.log", env={"PATH": path})
    started: list[psutil.Process] = []
    try:
        world.wait_healthy(START)
        started = psutil.Process(world.pid).children(recursive=True)
        asked = prompts([9, 30])
        assert_equal(send(world, asked, 8), expect(asked, 8))
        for role in ("attention", "ffn"):
            found = nsys.recorded(reports / role)
            assert found["verb"] == "profile" and set(OPTIONS) <= set(found["options"])
            command = found["command"]
            assert command[command.index("--afd-role") + 1] == role
            assert "--afd-nsys" not in command
        os.kill(world.pid, signal.SIGTERM)
        assert wait_until(lambda: world.exit_code is not None, END_WITHIN), world.tail()
        assert world.exit_code == 0, world.tail()
        assert not [process for process in started if alive(process)]
        written = sorted(file.name for file in reports.glob("*.nsys-rep"))
        assert written == ([] if execs else ["attention.nsys-rep", "ffn.nsys-rep"])
    finally:
        for process in filter(alive, started):
            process.kill()
        world.kill()


def alive(process: psutil.Process) -> bool:
    """Whether it runs, rather than waits to be reaped by whoever took it over."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
