"""Hooks that change what F ranks do and leave A ranks to SGLang."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sglang_afd.context import current
from sglang_afd.topology import Role


def on_ffn(instead: Callable[..., Any]) -> Callable[..., Any]:
    """An AROUND hook: `instead` in the original's place on F ranks, the original on A ranks."""

    @wraps(instead)
    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        chosen = original if current().role is Role.ATTENTION else instead
        return chosen(*args, **kwargs)

    return hook
