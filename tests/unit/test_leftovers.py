"""A command's temporary files and shared memory are gone after its end."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.managers import load_snapshot

from sglang_afd.upstream import leftovers

pytestmark = pytest.mark.unit


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """The temporary folder and the shared memory that a command finds."""
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    temporary.mkdir()
    shared.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(leftovers, "_command", None)
    monkeypatch.setattr(leftovers, "_SHARED", shared)
    loads = shared / "loads"
    monkeypatch.setattr(load_snapshot, "shm_path_for", lambda name: str(loads))
    monkeypatch.setattr(load_snapshot, "_zmq_addr_for", lambda ports: f"ipc://{temporary}/loads")
    return temporary, shared


def test_all_of_it_is_removed_and_nothing_of_others(folders: tuple[Path, Path]) -> None:
    temporary, shared = folders
    leftovers.begin()
    assert os.environ["TMPDIR"] == tempfile.gettempdir() != str(temporary)
    Path(tempfile.mkstemp()[1])
    ranks = [SimpleNamespace(pid=12), SimpleNamespace(pid=34)]
    leftovers._note((None, ranks), None, None, SimpleNamespace(instance_id="x"))
    for name in ("loads", "sgl_shm_mq_12_ab", "sgl_shm_mq_34_cd", "sgl_shm_mq_56_ef", "other_12_a"):
        (shared / name).touch()
    (temporary / "loads").touch()
    leftovers.remove()
    assert sorted(path.name for path in shared.iterdir()) == ["other_12_a", "sgl_shm_mq_56_ef"]
    assert not list(temporary.iterdir()) and tempfile.gettempdir() == str(temporary)


def test_a_child_removes_nothing(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, Path]
) -> None:
    """A rank that ends has what its command has begun, if it was forked."""
    temporary, _ = folders
    leftovers.begin()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        leftovers.remove()
    assert len(list(temporary.iterdir())) == 1
    leftovers.remove()
    assert not list(temporary.iterdir())


def test_an_offline_engine_notes_nothing(folders: tuple[Path, Path]) -> None:
    leftovers._note((None, []), None, None, SimpleNamespace(instance_id="x"))
    leftovers.remove()
