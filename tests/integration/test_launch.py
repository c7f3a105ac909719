"""The command itself: a fresh interpreter that spawns its ranks, as users start it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.reference import Expect, check
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = [pytest.mark.integration, pytest.mark.cold]

START_WITHIN = 480.0  # seconds; every rank imports SGLang, 20 s of CPU time for each process


def test_command(tmp_path: Path, expect: Expect) -> None:
    """Two counts are enough: the model, the platform and all else follow, and it is said."""
    world = World(
        Command(),
        ["--afd-attention-ranks", "2", "--afd-ffn-ranks", "1", "--dtype", "float32"],
        tmp_path / "server.log",
    )
    try:
        world.wait_healthy(START_WITHIN)
        assert "no --model-path given, serving the embedded Qwen3-MoE" in world.log
        for rank in ("attention rank 0", "attention rank 1", "FFN rank 0"):
            assert re.search(rf"^{rank} \(world rank \d\) +\d+ ", world.log, re.M), rank
        check(world, expect, prompts(), 24)
        world.stop()
    finally:
        world.kill()


def test_refusal(tmp_path: Path) -> None:
    """A command line that cannot be right ends before anything is imported that takes long."""
    flags = ["--afd-attention-ranks", "1", "--afd-ffn-ranks", "5"]
    world = World(Command(), flags, tmp_path / "server.log")
    assert world.wait_ended(30) == 2
    assert "12 experts do not divide over 5 FFN ranks" in world.log
