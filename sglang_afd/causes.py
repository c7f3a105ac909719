"""Why a command ends, told by the process that knows, so that the command's last line can say it.

A command's processes log side by side, and what ends first drags the others along: the cause then
stands pages above the end.  Each process notes here what it ends by; the command prints one.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

ENV = "SGLANG_AFD_CAUSES"
"""Path of the file that a command's processes append to."""

INTERRUPTED = 130
"""Status of a command that Ctrl-C has ended, as shells have it."""

REQUEST_LOST = (
    "the deployment has failed and ends, and this request with it; the server's log names the "
    "cause; send the request again once the server is back"
)
"""What the client of a request is told that a failing deployment has not answered."""

_CAUSE, _CONSEQUENCE = "cause ", "after "
_LONGEST = 1000  # characters of a note; it is one line of a terminal's scrollback


def collect() -> None:
    """Begin to gather what this process and those that it starts from now on note."""
    descriptor, path = tempfile.mkstemp(prefix="sglang_afd-causes-")
    os.close(descriptor)
    os.environ[ENV] = path


def note(text: str, *, consequence: bool = False) -> None:
    """Note why this process ends.

    Args:
        consequence: another process's end is the likely cause, and says more.
    """
    path = os.environ.get(ENV)
    if path is None:
        return
    line = (_CONSEQUENCE if consequence else _CAUSE) + " ".join(text.split())[:_LONGEST] + "\n"
    with suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write(line.encode(errors="replace"))


def told() -> str | None:
    """The cause: the first that was noted as one, else the first consequence; ends the gathering.

    None where nothing was noted.
    """
    path = os.environ.pop(ENV, None)
    if path is None:
        return None
    lines: list[str] = []
    with suppress(OSError):
        lines = Path(path).read_text(errors="replace").splitlines()
        os.unlink(path)
    lines.sort(key=lambda line: line.startswith(_CONSEQUENCE))  # stable: else as they were noted
    return lines[0][len(_CAUSE) :] if lines else None
