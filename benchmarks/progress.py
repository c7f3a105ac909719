"""Lines that say how far a benchmark is, with the seconds since it began."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print `text` behind the seconds since this module was imported."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)


def starting(name: str, every: float = 20.0) -> Callable[[Path], None]:
    """A `tick` for `sglang_afd.running.serve`: the log's last line, every so many seconds."""
    last = time.monotonic()

    def tick(log: Path) -> None:
        nonlocal last
        if time.monotonic() - last < every:
            return
        last = time.monotonic()
        lines = log.read_text(errors="replace").splitlines()
        say(f"{name} is starting: {lines[-1][:150] if lines else '(no log yet)'}")

    say(f"{name} starts")
    return tick
