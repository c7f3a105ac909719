"""Let one SGLang module see other parallel widths for the length of a block.

SGLang validates its parallel context as a whole, so the view that a single layer needs (its expert
ranks are only the F ranks) cannot be set there; modules read the context through a module-global
function, and that is what is shadowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _View:
    """An object seen with some attributes replaced."""

    def __init__(self, base: Any, replaced: dict[str, Any]) -> None:
        self._base, self._replaced = base, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._base, name)


@contextmanager
def parallel_view(module: Any, **values: Any) -> Iterator[None]:
    """Inside the block, `module` reads `values` from its ``get_parallel()``."""
    original = module.get_parallel
    module.get_parallel = lambda: _View(original(), values)
    try:
        yield
    finally:
        module.get_parallel = original
