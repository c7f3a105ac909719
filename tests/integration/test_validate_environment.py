"""The command itself, and a reference in an environment that has nothing of this package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from sglang_afd.causes import INTERRUPTED
from sglang_afd.observe.recording import Recordings
from sglang_afd.progress import Waiting
from sglang_afd.validate import references
from sglang_afd.validate.answers import Unanswered
from sglang_afd.validate.command import parser, resolve
from sglang_afd.validate.settings import Settings
from sglang_afd.validate.sides import SideFailed
from tests.support.processes import (
    busy_seconds,
    children_seconds,
    end_session,
    session_members,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    """The interpreter of an environment that finds PyTorch and transformers, but no sglang_afd."""
    folder = tmp_path / "environment"
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=120)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    python = str(folder / "bin" / "python")
    if "sglang_afd" in references.software_of(python)["packages"]:
        pytest.skip("sglang_afd is installed beside PyTorch here")
    return python


def settings(tmp_path: Path, *argv: str) -> Settings:
    own, rest = parser().parse_known_args([*argv, "--prompts", "short", "--new-tokens", "3"])
    made = resolve(own, [*rest, "--device", "cpu"], tmp_path, program="validate")
    short = made.prompts._replace(prompts=made.prompts.prompts[:4])
    return replace(made, prompts=short, record=(3,))


def silent() -> Waiting:
    return Waiting(Console(file=StringIO()))


def test_hf_answers_and_records_elsewhere(elsewhere: str, tmp_path: Path) -> None:
    made = settings(tmp_path, "--reference-python", elsewhere)
    found = references.answer(made, silent())
    assert not any(isinstance(result, Unanswered) for result in found.results)
    assert elsewhere in found.identity.software["python"]
    assert "sglang_afd" not in found.identity.software["packages"]
    recorded = Recordings(made.recordings("reference"))
    assert recorded.layers == [0, 1, 2, 3]
    length = len(made.prompts.prompts[3]) + 2  # the last of three new tokens is not read
    assert recorded.rows == {(3, position) for position in range(length)}


def test_a_reference_that_breaks_off_shows_its_log(elsewhere: str, tmp_path: Path) -> None:
    made = replace(settings(tmp_path, "--reference-python", elsewhere), reference_model=tmp_path)
    with pytest.raises(SideFailed, match=r"the reference hf ended with 1; its log .*ends:") as end:
        references.answer(made, silent())
    assert "config.json" in str(end.value)


def test_sglang_elsewhere_on_a_cpu_needs_this_package(elsewhere: str, tmp_path: Path) -> None:
    made = settings(tmp_path, "--reference-python", elsewhere, "--reference", "sglang")
    with pytest.raises(SideFailed, match="install sglang_afd there"):
        references.answer(made, silent())


@pytest.mark.full
def test_the_command_without_flags_takes_under_three_minutes(tmp_path: Path) -> None:
    """On two idle cores; where others take them, its CPU time must leave room for that."""
    out = tmp_path / "validation.json"
    began, busy, own = time.monotonic(), busy_seconds(), children_seconds()
    command = [sys.executable, "-m", "sglang_afd.validate", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=tmp_path)
    seconds, spent = time.monotonic() - began, children_seconds() - own
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    others = (busy_seconds() - busy - spent) / seconds / len(os.sched_getaffinity(0))
    print(f"{seconds:.0f} s, {spent:.0f} s of CPU time; others took {others:.0%} of the cores")
    assert seconds < 180 if others < 0.1 else spent < 240


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT], ids=lambda end: end.name)
def test_ending_the_command_ends_what_it_started(end: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sglang_afd.validate", "--work", str(tmp_path)]
    # A shell without job control starts what runs in the background with interrupts ignored.
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert wait_until(lambda: any(tmp_path.glob("*/reference.log")), 120)
        time.sleep(1)
        assert len(session_members(process.pid)) > 1, "the reference runs"
        os.kill(process.pid, end)
        assert process.wait(60) == INTERRUPTED
        assert wait_until(lambda: not session_members(process.pid), 10)
    finally:
        end_session(process.pid)
