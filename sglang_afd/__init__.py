"""Attention-FFN disaggregation for SGLang: experts on ranks of their own."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_afd.engine import Engine as Engine

__all__ = ["Engine"]
__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # ``python -m sglang_afd.X`` is being looked up
    _missing = [name for name in ("msgspec", "sglang") if find_spec(name) is None]
    if _missing:
        raise SystemExit(
            f"sglang_afd: error: {sys.executable} has no package {_missing[0]}; run `make setup`, "
            f"then `source .venv/bin/activate`, and try again"
        )


def __getattr__(name: str) -> Any:
    """`Engine` is imported when it is asked for: it brings SGLang along."""
    if name == "Engine":
        from sglang_afd.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
