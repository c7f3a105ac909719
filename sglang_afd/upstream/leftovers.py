"""What a command's processes would leave behind: shared memory and temporary files.

SGLang ends its processes by SIGKILL, so that nothing of theirs is cleaned up: each start left a
segment of 24 MB and a table of loads in ``/dev/shm``, and sockets in the temporary folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sglang_afd.upstream.hooks import Hook, Kind

_SHARED = Path("/dev/shm")
_TMPDIR = "TMPDIR"


class _Command(NamedTuple):
    """The command that this process runs."""

    process: int
    folder: str
    """Where its processes make temporary files."""
    outside: str | None
    """The temporary folder that it found."""
    files: list[Path]
    """Others that are known by name."""
    children: list[int]
    """Processes whose ids are in the names of their shared memory."""


_command: _Command | None = None


def begin() -> None:
    """Give this command and the processes that it starts a temporary folder of their own."""
    global _command
    folder = tempfile.mkdtemp(prefix="sglang_afd-")
    _command = _Command(os.getpid(), folder, os.environ.get(_TMPDIR), [], [])
    _use(folder)


def remove() -> None:
    """Remove what is left, if this process has begun; its children must have ended."""
    global _command
    if _command is None or _command.process != os.getpid():
        return
    command, _command = _command, None
    _use(command.outside)
    shutil.rmtree(command.folder, ignore_errors=True)
    stamped = (path for pid in command.children for path in _SHARED.glob(f"sgl_shm_*_{pid}_*"))
    for path in [*command.files, *stamped]:
        with suppress(OSError):
            path.unlink()


def _use(folder: str | None) -> None:
    tempfile.tempdir = None  # it is read from the environment again
    if folder is None:
        os.environ.pop(_TMPDIR, None)
    else:
        os.environ[_TMPDIR] = folder


def _note(
    result: tuple[Any, list[Any]], engine: Any, server_args: Any, port_args: Any, *_: Any, **__: Any
) -> None:
    from sglang.srt.managers import load_snapshot

    if _command is None:
        return  # an offline engine
    _command.children.extend(process.pid for process in result[1])
    _command.files.append(Path(load_snapshot.shm_path_for(port_args.instance_id)))
    _command.files.append(Path(load_snapshot._zmq_addr_for(port_args).removeprefix("ipc://")))


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        Kind.AFTER,
        _note,
        "what the ranks make in shared memory is removed by nobody if they are killed",
    ),
)
