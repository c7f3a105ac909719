"""The one line that says why a command ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_afd import causes

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def gathering(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command that gathers causes, as in its processes."""
    monkeypatch.setenv(causes.ENV, "")
    causes.collect()
    return Path(os.environ[causes.ENV])


def test_the_first_cause_counts_before_consequences(gathering: Path) -> None:
    causes.note("a peer is gone", consequence=True)
    causes.note("out of memory\n  in line 5")
    causes.note("later")
    assert causes.told() == "out of memory in line 5"
    assert not gathering.exists()


def test_a_consequence_is_better_than_nothing() -> None:
    causes.note("a peer is gone", consequence=True)
    causes.note("another too", consequence=True)
    assert causes.told() == "a peer is gone"


def test_nothing_noted(gathering: Path) -> None:
    assert causes.told() is None
    assert not gathering.exists() and causes.ENV not in os.environ
    causes.note("after the end: nobody gathers any more")
    assert causes.told() is None


def test_processes_share_it() -> None:
    pid = os.fork()
    if not pid:
        causes.note("told by a child")
        os._exit(0)
    os.waitpid(pid, 0)
    assert causes.told() == "told by a child"
