"""The measurements that are scripts of their own, run as a process and read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.configuration import Script


class ScriptFailed(RuntimeError):
    """A script ended badly or wrote nothing; what it said is on the terminal."""


def measure(configuration: Script, work: Path) -> dict[str, Any]:
    """Run the configuration's script; what it wrote, without the identity that a record has.

    Raises:
        ScriptFailed: it ended badly, or not in time.
    """
    out = work / "two_gpus" if configuration.script == "two_gpus" else work / "script.json"
    command = [sys.executable, "-m", f"benchmarks.{configuration.script}", "--out", str(out)]
    if configuration.script == "two_gpus":
        command += ["--work", str(work)]
    process = subprocess.Popen(
        [*command, *configuration.args], start_new_session=True, preexec_fn=_heed_ctrl_c
    )
    try:
        status: int | str = process.wait(configuration.seconds)
    except subprocess.TimeoutExpired:
        status = f"no end within {configuration.seconds:g} s"
    finally:
        _end(process)
    if status != 0:
        raise ScriptFailed(f"benchmarks.{configuration.script}: {status}")
    files = sorted(out.glob("*.json")) if out.is_dir() else [out]
    found = {file.stem: _read(file) for file in files}
    return found if out.is_dir() else found[out.stem]


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text())
    content.pop("identity", None)
    return content


def _heed_ctrl_c() -> None:
    """In the script's process: a parent that runs in the background may ignore it, and hands that
    on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the script's whole process group."""
    try:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: servers of its own are ended
        process.wait(60)
    except (ProcessLookupError, PermissionError):
        pass
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
