"""How commands show what they are waiting for, on a terminal and in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

_REPORT_SECONDS = 10.0  # between two lines where the output is no terminal


class Waiting(AbstractContextManager["Waiting"]):
    """A line that says what is going on: renewed on a terminal, now and then elsewhere."""

    def __init__(self, console: Console, text: str = "starting") -> None:
        self._console, self._status = console, console.status(text)
        if console.is_terminal:
            self.update: Callable[[str], None] = self._status.update
        else:
            self.update = now_and_then(lambda line: console.print(line, highlight=False))

    def __enter__(self) -> Waiting:
        self._status.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the line away."""
        self._status.stop()

    def begin(self, what: str) -> None:
        """Print that a step begins, and wait for it."""
        self._console.print(what, highlight=False)
        self._status.update(what)

    def counting(self, what: str, total: int) -> Callable[[], None]:
        """What to call whenever one of `total` things is done."""
        lock, done = threading.Lock(), 0

        def one_more() -> None:
            nonlocal done
            with lock:
                done += 1
                self.update(f"{what}: {done} of {total}")

        return one_more


def now_and_then(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, at most once in `_REPORT_SECONDS`: for output that keeps every line."""
    last = time.monotonic()

    def update(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_SECONDS:
            last = time.monotonic()
            say(text)

    return update


def log_tick(update: Callable[[str], None]) -> Callable[[Path], None]:
    """A `tick` for `sglang_afd.running.serve`: the seconds, and a rank's last line in the log."""
    began = time.monotonic()

    def tick(log: Path) -> None:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line[:1] == "["]
        latest = lines[-1].partition("] ")[2][:80] if lines else "loading SGLang"
        update(f"{time.monotonic() - began:3.0f} s  {latest}")

    return tick
