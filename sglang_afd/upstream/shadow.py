"""Let SGLang see something else for the length of a block.

SGLang validates its parallel context as a whole, so the view that a single layer needs (its expert
ranks are only the F ranks) cannot be set there; modules read the context through a module-global
function, and that is what is shadowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ALONE = {"moe_ep_size": 1, "moe_ep_rank": 0, "moe_tp_size": 1, "moe_tp_rank": 0}
"""Of `parallel_view`: a layer's experts lie on this rank alone."""


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


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside the block, `owner` has `values` for attributes that it has already."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
