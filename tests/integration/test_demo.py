"""The demonstration, as ``make demo`` runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from tests.support.processes import session_members

WITHIN = 240.0  # seconds, once the environment exists


@pytest.mark.integration
@pytest.mark.full
def test_demo(request: pytest.FixtureRequest) -> None:
    """It answers from the text that its model has learnt, shows the ranks, and leaves nothing."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_afd.demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=2 * WITHIN)
    finally:
        process.kill()
    seconds = time.monotonic() - began
    request.node.user_properties.append(("demo", f"{seconds:.0f}"))
    assert process.returncode == 0, output
    for rank in ("attention rank 0", "attention rank 1", "FFN rank 0"):
        assert re.search(rf"{rank} .*\d", output), output
    assert re.search(r"\(\d{2,} tokens in ", output), output
    assert re.search(r"no process is left\.\s+\d+ s in all", output), output
    assert not session_members(process.pid)
    assert seconds < WITHIN, output
