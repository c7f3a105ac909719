"""Hooks that change what ranks of one role do and leave the others to SGLang."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sglang_afd.context import current
from sglang_afd.topology import Role


def on_ffn(instead: Callable[..., Any]) -> Callable[..., Any]:
    """An AROUND hook: `instead` in the original's place on F ranks, the original on others."""
    return _where(lambda: current().role is Role.FFN, instead)


def on_model(instead: Callable[..., Any]) -> Callable[..., Any]:
    """An AROUND hook: `instead` in the original's place on model ranks, the original on others."""
    return _where(lambda: current().role is Role.MODEL, instead)


def on_serving(instead: Callable[..., Any]) -> Callable[..., Any]:
    """An AROUND hook: `instead` in the original's place on ranks that hold no requests."""
    return _where(lambda: not current().leads, instead)


def _where(chosen: Callable[[], bool], instead: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(instead)
    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (instead if chosen() else original)(*args, **kwargs)

    return hook
