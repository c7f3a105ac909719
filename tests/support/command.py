"""Start a server as a user does: the command, in a fresh interpreter, its ranks spawned by it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class Command:
    """Launches ``python -m sglang_afd.launch_server``; in a zygote's place for `World`."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def fork(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
        """Start the command with `argv` in a session of its own; return its pid."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "SGL_"))}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "sglang_afd.launch_server", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**clean, **env},
                start_new_session=True,
            )
        self._processes[process.pid] = process
        return process.pid

    def exit_code(self, pid: int) -> int | None:
        """How the command ended (negative: the signal), or None while it runs."""
        return self._processes[pid].poll()
