"""The demonstration, as ``make demo`` runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sglang_afd.observe.trace import read
from tests.support.processes import busy_seconds, cpu_seconds, session_members

WITHIN = 240.0  # seconds, once the environment exists, if others leave the cores alone
PATIENCE = 500.0
QUIET = 0.1  # share of the cores that others may take


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.cold
def test_demo(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """It answers from the text that its model has learnt, shows the ranks, and leaves nothing."""
    began, busy = time.monotonic(), busy_seconds()
    own: dict[int, float] = {}
    with (tmp_path / "output").open("w+") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_afd.demo"],
            stdout=file,
            stderr=file,
            env={**os.environ, "COLUMNS": "160"},
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() - began < PATIENCE:
                own |= _cpu_seconds(process.pid)
                time.sleep(1)
        finally:
            process.kill()
        seconds = time.monotonic() - began
        file.seek(0)
        output = file.read()
    request.node.user_properties.append(("demo", f"{seconds:.0f}"))
    assert process.returncode == 0, output
    for rank in ("attention rank 0", "attention rank 1", "FFN rank 0"):
        assert re.search(rf"{rank} .*\d", output), output
    assert re.search(r"\(\d{2,} tokens in ", output), output
    assert re.search(r"overlap efficiency 0\.\d\d", output), output
    saved = re.search(r"of this answer \((\S+)\)", output)
    assert saved and len(read(Path(saved[1])).ranks) == 3, output
    assert re.search(r"no process is left\.\s+\d+ s in all", output), output
    assert not session_members(process.pid)
    others = (busy_seconds() - busy - sum(own.values())) / seconds / len(os.sched_getaffinity(0))
    if others < QUIET:
        assert seconds < WITHIN, f"{seconds:.0f} s, others took {others:.0%} of the cores"


def _cpu_seconds(leader: int) -> dict[int, float]:
    """What each process of a session has used so far."""
    used = {}
    for process in session_members(leader):
        try:
            used[process.pid] = cpu_seconds([process])
        except psutil.NoSuchProcess:
            continue
    return used
