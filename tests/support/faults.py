"""Faults that a forked server can have on purpose, so that a test shows that it would notice.

Name one in a world's environment: ``start(argv, env={FAULT: "hold_every_tensor"})``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

FAULT = "SGLANG_AFD_TEST_FAULT"


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


FAULTS: dict[str, Callable[[], None]] = {"hold_every_tensor": hold_every_tensor}
