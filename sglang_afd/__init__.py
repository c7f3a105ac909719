"""Attention-FFN disaggregation for SGLang: experts on ranks of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_afd.engine import Engine as Engine

__all__ = ["Engine"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Engine` is imported when it is asked for: it brings SGLang along."""
    if name == "Engine":
        from sglang_afd.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
