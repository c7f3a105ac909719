"""A process of SGLang's whose parent dies while it imports."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sglang_afd import plugin


def child(running: str) -> None:
    """Be such a process, and get as far as loading the plugins; touches the file `running`."""
    parent = os.getppid()
    Path(running).touch()
    while os.getppid() == parent:
        time.sleep(0.05)
    plugin._end_if_orphaned()
    time.sleep(120)
