"""A hook that does not take, or another SGLang, ends the start with one clear error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.faults import FAULT, only_children
from tests.support.world import World

pytestmark = pytest.mark.integration

START = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")
FORKED_WITHIN = 20.0  # seconds: SGLang is imported
SPAWNED_WITHIN = 240.0  # seconds: every process imports SGLang first
NO_TARGET = (
    "sglang_afd: SGLang 0.5.23 has no sglang.srt.managers.scheduler.Scheduler.no_such_method to "
    "hook (planted by a test): AttributeError('no_such_method')"
)
NO_VERSION = (
    "sglang_afd: sglang_afd hooks SGLang 0.5.23, but SGLang 0.5.24 is installed; run: "
    "pip install sglang==0.5.23"
)


def errors(world: World) -> list[str]:
    """The lines that the extension's start has printed."""
    return re.findall(r"^sglang_afd: .*$", world.log, re.M)


@pytest.mark.parametrize(
    ("fault", "error"), [("hook_nothing", NO_TARGET), ("another_version", NO_VERSION)]
)
def test_in_the_command(start: Callable[..., World], fault: str, error: str) -> None:
    """Before a rank is started: the error and nothing else."""
    world = start(START, env={FAULT: fault})
    assert world.wait_ended(FORKED_WITHIN) == 1
    assert errors(world) == [error], world.tail()
    assert "Traceback" not in world.log, world.tail()


def test_in_its_processes(start: Callable[..., World]) -> None:
    """Each process checks for itself, and one that fails ends all of them."""
    world = start(START, env={FAULT: "another_version_in_children"})
    assert world.wait_ended(2 * FORKED_WITHIN) != 0
    assert set(errors(world)) == {NO_VERSION}, world.tail()
    assert "fired up and ready" not in world.log


@pytest.mark.full
def test_in_its_processes_as_users_start_them(tmp_path: Path) -> None:
    """The same in fresh interpreters, for a hook that does not take."""
    env = only_children("hook_nothing", tmp_path)
    world = World(Command(), START, tmp_path / "server.log", env=env)
    try:
        assert world.wait_ended(SPAWNED_WITHIN) != 0
    finally:
        world.kill()
    assert set(errors(world)) == {NO_TARGET}, world.tail()
    assert "fired up and ready" not in world.log
