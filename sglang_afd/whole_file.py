"""Files that readers see whole or not at all, also where the disk is full."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes, *, new: bool = False) -> None:
    """Write `content` to `path`.

    Args:
        new: the file must not exist yet.

    Raises:
        FileExistsError: it does.
        OSError: it cannot be written; what was at `path` is still there.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        if new:
            os.link(draft, path)  # a rename would take the place of a file that has come meanwhile
        else:
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
