"""Worlds: servers under test, forked from one zygote, watched and stopped without leftovers."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from sglang_afd.addresses import port_problem
from sglang_afd.running import free_port, ports_of
from sglang_afd.upstream.ports import LOOPBACK
from tests.support.client import Client
from tests.support.processes import (
    busy_seconds,
    cpu_seconds,
    end_session,
    session_members,
    shared_files,
    wait_until,
)

ZYGOTE_START = 120.0  # seconds; imports take 12 to 25 on a quiet machine
WORLD_START = 240.0
"""Seconds; a world is up in 8 to 15 on a quiet machine, and how long it takes is
`tests/integration/test_start_time.py`'s affair: here the rest is for a machine that others load."""
MEMORY = 2 * 2**30
"""Bytes that one process may hold: 0.9 GiB is usual; no pool is sized by the machine's memory, or
a second world beside this one runs out of it."""
STOP = 80.0  # seconds; SGLang polls for SIGTERM every 5 s, then drains and ends its ranks


class Launcher(Protocol):
    """What starts a server: a zygote, or the command itself."""

    def fork(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
        """Start ``launch_server`` with `argv` in a session of its own; return its pid."""

    def exit_code(self, pid: int) -> int | None:
        """How the launcher `pid` ended (negative: the signal), or None while it runs."""


class Zygote:
    """The process that imported SGLang; started at first use, one per test session."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def fork(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
        """Start ``launch_server`` with `argv`; return the launcher's pid."""
        return self._ask({"argv": list(argv), "log": str(log), "env": dict(env)})["pid"]

    def run(self, program: Path, argv: Sequence[str], log: Path) -> int:
        """Run a Python program in the launcher's place, ``if __name__ == "__main__"``; its pid."""
        return self._ask({"program": str(program), "argv": list(argv), "log": str(log)})["pid"]

    def exit_code(self, pid: int) -> int | None:
        """How the launcher `pid` ended (negative: the signal), or None while it runs."""
        return self._ask({"wait": pid})["code"]

    def stop(self) -> None:
        """End the zygote; the kernel ends launchers that are left."""
        if self._process is not None:
            self._process.communicate(timeout=20)
            self._process = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer(self._process, 20)

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("zygote.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )
        self._answer(process, ZYGOTE_START)
        return process

    def _answer(self, process: subprocess.Popen[str], within: float) -> dict[str, Any]:
        assert process.stdout
        readable, _, _ = select.select([process.stdout], [], [], within)
        line = process.stdout.readline() if readable else ""
        if not line:
            process.kill()
            tail = self._log.read_text()[-2000:]
            raise RuntimeError(f"the zygote gave no answer within {within:g} s:\n{tail}")
        return json.loads(line)


class Start(NamedTuple):
    """How long a world took from its fork until it was healthy."""

    seconds: float
    others: float
    """Share of the cores that processes of other programs took in that time."""


class World(Client):
    """One server, from its start until nothing of it is left.

    The test that starts a world stops it; `Worlds` does both for tests that share one.
    """

    def __init__(
        self,
        launcher: Launcher,
        argv: Sequence[str],
        log: Path,
        *,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(free_port() if port is None else port)
        self._launcher, self.log_path = launcher, log
        log.write_text("")  # not what an earlier server has left there
        self.pid = launcher.fork([*argv, "--port", str(self.port)], log, env or {})
        self._forked, self._busy = time.monotonic(), busy_seconds()
        self.started: Start | None = None
        """None: it has not been healthy yet."""
        self._afd = any(arg.startswith("--afd-") for arg in argv)
        self.shared: set[Path] = set()
        """Files in shared memory that it had when it became healthy; plain SGLang leaves them."""

    @property
    def log(self) -> str:
        """What the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """Where a command that failed names the cause."""
        return self.log.splitlines()[-1]

    @property
    def exit_code(self) -> int | None:
        """How the launcher ended (negative: the signal), or None while it runs."""
        return self._launcher.exit_code(self.pid)

    def processes(self) -> list[psutil.Process]:
        """Living processes of this server, the launcher included."""
        return session_members(self.pid)

    def wait_healthy(self, within: float = WORLD_START) -> World:
        """Wait until the server answers ``/health``; it is stopped if it does not come up."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if (code := self.exit_code) is not None:
                end_session(self.pid)
                raise AssertionError(f"the server ended with {code} while starting:\n{self.tail()}")
            if "fired up and ready" in self.log and self.get("/health").status_code == 200:
                self.started = self.started or self._start()
                self.shared = shared_files(self.processes()) if self._afd else set()
                return self
            time.sleep(0.2)
        end_session(self.pid)
        raise AssertionError(f"the server is not healthy within {within:g} s:\n{self.tail()}")

    def _start(self) -> Start:
        seconds = time.monotonic() - self._forked
        others = busy_seconds() - self._busy - cpu_seconds(self.processes())
        return Start(seconds, max(0.0, others) / seconds / len(os.sched_getaffinity(0)))

    def wait_ended(self, within: float) -> int:
        """Wait until the launcher and every process of it has ended; return the exit code."""
        ended = wait_until(
            lambda: self.exit_code is not None and not self.processes(), within, step=0.2
        )
        left = [f"{p.pid} {' '.join(p.cmdline())[:60]}" for p in self.processes()]
        code = self.exit_code
        if not ended:
            end_session(self.pid)
        assert ended, f"after {within:g} s: exit code {code}, still there: {left}\n{self.tail()}"
        assert code is not None
        return code

    def wait_gone(self, within: float) -> int:
        """`wait_ended`; by then its ports are free, and its shared memory is gone."""
        deadline = time.monotonic() + within
        code = self.wait_ended(within)
        taken = lambda: [p for p in ports_of(self.port) if port_problem(LOOPBACK, p)]  # noqa: E731
        assert wait_until(lambda: not taken(), deadline - time.monotonic()), taken()
        self._check_shared()
        return code

    def stop(self) -> None:
        """End the server as an operator does.

        It must have held less than `MEMORY`, end clean and leave nothing behind.
        """
        sizes = {p.pid: p.memory_info().rss for p in self.processes()}
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGTERM)
        code = self.wait_ended(STOP)
        assert code == 0, f"the server ended with {code}:\n{self.tail()}"
        assert all(size < MEMORY for size in sizes.values()), f"bytes by process: {sizes}"
        self._check_shared()

    def _check_shared(self) -> None:
        left = {path for path in self.shared if path.exists()}
        assert not left, f"shared memory is left: {left}"

    def kill(self) -> None:
        """End the server at once, without asking whether it is well."""
        end_session(self.pid)
        wait_until(lambda: self.exit_code is not None, 10)

    def tail(self, characters: int = 6000) -> str:
        """The end of the log, without SGLang's dump of its arguments."""
        lines = [line[:1000] for line in self.log.splitlines() if "server_args=" not in line]
        return "\n".join(lines)[-characters:]


class Worlds:
    """Keeps one shared world alive: the one that the tests of the moment ask for."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote, self._folder = zygote, folder
        self._worlds: list[World] = []
        self._argv: tuple[str, ...] | None = None
        self.current: World | None = None
        self.recent: list[World] = []
        """Servers that the running test has started or uses."""

    def start(self, argv: Sequence[str], **kwargs: Any) -> World:
        """A server of the caller's own, which the caller stops."""
        log = self._folder / f"world{len(self._worlds) + 1}.log"
        world = World(self.zygote, argv, log, **kwargs)
        self._worlds.append(world)
        self.recent.append(world)
        return world

    def starts(self) -> list[Start]:
        """Of every server so far that became healthy."""
        return [world.started for world in self._worlds if world.started is not None]

    def shared(self, argv: Sequence[str]) -> World:
        """The healthy shared world of `argv`: the running one, or a fresh one in its place."""
        if self.current is None or self.current.exit_code is not None:
            self.discard()  # an end that was not asked for has failed its test already
        elif self._argv == tuple(argv):
            return self.current
        self.release()
        self.current, self._argv = self.start(argv), tuple(argv)
        return self.current.wait_healthy()

    def release(self) -> None:
        """Stop the shared world, if there is one; raises if it does not end clean."""
        world, self.current, self._argv = self.current, None, None
        if world is not None:
            world.stop()

    def discard(self) -> None:
        """Kill the shared world, if there is one, whatever its state."""
        world, self.current, self._argv = self.current, None, None
        if world is not None:
            world.kill()

    def forget_ended(self) -> None:
        """Keep only the shared world in `recent`."""
        self.recent = [self.current] if self.current is not None else []
