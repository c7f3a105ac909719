"""Run a server as a child of this process, talk to it, and leave no process behind."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_afd.addresses import port_problem
from sglang_afd.upstream.ports import LOOPBACK, first_command_ports, one_command_ports

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class ServerFailed(RuntimeError):
    """A server ended, or was not healthy in time; the message ends with its log's last lines."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    port: int
    start_seconds: float
    log: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        """GET `path`, or POST `body` to it; the decoded JSON answer."""
        return call(self.url + path, body, timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float = 300) -> None:
        """POST `body` to `path`, whatever the answer's text."""
        _ask(self.url + path, body, timeout)


def call(
    url: str,
    body: dict[str, Any] | None,
    timeout: float,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """GET `url`, or POST `body` to it; the decoded JSON answer."""
    return json.loads(_ask(url, body, timeout, headers))


def _ask(
    url: str,
    body: dict[str, Any] | None,
    timeout: float,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"content-type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read()


@contextmanager
def serve(
    name: str,
    args: Sequence[str],
    *,
    logs: Path,
    port: int | None = None,
    module: str = "sglang_afd.launch_server",
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
    timeout: float = 400,
    tick: Callable[[Path], None] = lambda log: None,
) -> Iterator[Server]:
    """Run ``python -m module args`` until the block ends; begin the block when it is healthy.

    Args:
        logs: folder for ``name.log``, the server's output.
        python: the interpreter that runs it.
        tick: called with the log about twice a second while the server starts.

    Raises:
        ServerFailed: the server ended, or was not healthy within `timeout` seconds.
    """
    starting = start(
        name, args, logs=logs, port=port, module=module, python=python, environment=environment,
        timeout=timeout, tick=tick,
    )  # fmt: skip
    with starting as healthy:
        yield healthy()


@contextmanager
def start(
    name: str,
    args: Sequence[str],
    *,
    logs: Path,
    port: int | None = None,
    module: str = "sglang_afd.launch_server",
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
    timeout: float = 400,
    tick: Callable[[Path], None] = lambda log: None,
) -> Iterator[Callable[[], Server]]:
    """As `serve`, but begin the block at once; what it is given waits until the server is healthy.

    So two commands that wait for each other can start at the same time.
    """
    log = logs / f"{name}.log"
    port = free_port() if port is None else port
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [python, "-m", module, "--port", str(port), *args],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def healthy() -> Server:
        _await_health(process, name, port, log, timeout, tick)
        return Server(name, port, time.monotonic() - began, log)

    try:
        yield healthy
    finally:
        _end(process)


def end_with_parent() -> None:
    """In a child, before its program runs: the thread's end that started it sends it SIGTERM."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """The signals that ask this process for an end, as they come."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _: asked.append(got))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_given: deque[frozenset[int]] = deque(maxlen=64)


def ports_of(port: int) -> list[int]:
    """All that a command may bind with HTTP port `port`, or with this port in --dist-init-addr."""
    derived = (*one_command_ports(port), *first_command_ports(LOOPBACK, port))
    return sorted({port, *(other.port for other in derived)})


def free_port() -> int:
    """A port that is free with all its `ports_of`, below the range that the system hands out.

    It is drawn at random, so that other programs which draw one now hardly ever draw the same, and
    shares no port with the last that this process was given: their servers may not listen yet.

    Raises:
        ServerFailed: there is none among many.
    """
    for port in random.sample(range(10000, 30000), 1000):
        ports = ports_of(port)
        given = any(taken.intersection(ports) for taken in _given)
        if not given and not any(port_problem(LOOPBACK, other) for other in ports):
            _given.append(frozenset(ports))
            return port
    raise ServerFailed("this machine has no free ports between 10000 and 30000")


def _await_health(
    process: subprocess.Popen[bytes],
    name: str,
    port: int,
    log: Path,
    timeout: float,
    tick: Callable[[Path], None],
) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            tick(log)
            time.sleep(0.5)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGABRT)  # SGLang's ranks then log where they hang
        time.sleep(2)
        state = f"was not healthy within {timeout:g} s"
    else:
        state = f"ended with {process.returncode}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise ServerFailed(f"{name} {state}; its log {log} ends:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server's whole process group.

    Raises:
        ServerFailed: a process of it survives even SIGKILL.
    """
    for first, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 15.0)):
        sign: int = first
        deadline = time.monotonic() + patience
        while _signal_group(process, sign):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
            sign = 0 if sign == signal.SIGTERM else sign
        else:
            return
    raise ServerFailed(f"processes of group {process.pid} survive; end them by hand")


def _signal_group(process: subprocess.Popen[bytes], sign: int) -> bool:
    """Send `sign` (0: nothing) to the server's processes; False if there is none left."""
    process.poll()  # reap the first of them, or it stays in the group as a zombie
    try:
        os.killpg(process.pid, sign)
    except ProcessLookupError:
        return False
    return True
