"""Faults that a server can have on purpose, so that a test shows that it would notice.

Name one in the environment of a world that a zygote forks, ``start(argv, env={FAULT: NAME})``, or
give a command `only_children`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

FAULT = "SGLANG_AFD_TEST_FAULT"
_IN_CHILDREN = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    sys.path.append({folder!r})
    import faults
    faults.plant()
"""


def plant() -> None:
    """Give this process the fault that its environment names, if it names one."""
    if name := os.environ.get(FAULT):
        {fault.__name__: fault for fault in FAULTS}[name]()


def only_children(name: str, folder: Path) -> dict[str, str]:
    """Environment of a command whose spawned processes have a fault that it has not itself."""
    (folder / "sitecustomize.py").write_text(_IN_CHILDREN.format(folder=str(Path(__file__).parent)))
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {FAULT: name, "PYTHONPATH": path}


def hold_every_tensor() -> None:
    """Ranks read all tensors, whatever their role, and keep them until loading ends.

    The filter by role alone would not show: safetensors maps files, so that a tensor that nobody
    reads takes no memory.
    """
    from sglang_afd.upstream import loading

    def read(original: Any, files: list[str], *args: Any, **kwargs: Any) -> Iterator[tuple]:
        import safetensors

        held = []
        for file in files:
            with safetensors.safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                    held.append(tensors.get_tensor(name).clone())
                    yield name, held[-1]

    loading.HOOKS = tuple(replace(hook, fn=read) for hook in loading.HOOKS)


def hook_nothing() -> None:
    """One hook more, on something that SGLang does not have."""
    from sglang_afd import upstream

    original = upstream.all_hooks

    def all_hooks(config: Any) -> tuple:
        from sglang_afd.upstream.hooks import Hook, Kind

        target = "sglang.srt.managers.scheduler.Scheduler.no_such_method"
        return (*original(config), Hook(target, Kind.AFTER, print, "planted by a test"))

    upstream.all_hooks = all_hooks


def another_version() -> None:
    """SGLang says that it is a later one."""
    import sglang

    sglang.__version__ = "0.5.24"


def another_version_in_children() -> None:
    """The same in the processes that a forked launcher forks, which check for themselves then."""

    def forget() -> None:
        from sglang.srt import plugins

        plugins._plugins_loaded = False
        another_version()

    os.register_at_fork(after_in_child=forget)


FAULTS = (hold_every_tensor, hook_nothing, another_version, another_version_in_children)
