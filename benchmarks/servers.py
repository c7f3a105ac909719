"""Start a server for a measurement, talk to it, and leave no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    port: int
    start_seconds: float
    log: Path

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        """GET `path`, or POST `body` to it; the decoded JSON answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())


@contextmanager
def serve(
    name: str,
    args: Sequence[str],
    *,
    port: int,
    logs: Path,
    module: str = "sglang_afd.launch_server",
    environment: dict[str, str] | None = None,
    timeout: float = 300,
) -> Iterator[Server]:
    """Run ``python -m module args`` until the block ends.

    Raises:
        RuntimeError: the server ended, or was not healthy within `timeout` seconds.
    """
    log = logs / f"{name}.log"
    command = [sys.executable, "-m", module, "--port", str(port), *args]
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        _await_health(process, name, port, log, timeout)
        yield Server(name, port, time.monotonic() - began, log)
    finally:
        _end(process)


def _await_health(
    process: subprocess.Popen[bytes], name: str, port: int, log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGABRT)  # SGLang's ranks then log where they hang
        time.sleep(2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    state = "still starts" if process.poll() is None else f"ended with {process.returncode}"
    raise RuntimeError(f"{name} {state} after {timeout:g} s at most; its log ends:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    time.sleep(1)  # accelerators release their memory a moment after the processes end
