"""How the extension attaches to SGLang: declared hooks, installed once, and checked.

SGLang's ``HookRegistry`` logs and swallows a hook that fails to apply; a rank that runs unhooked
would hang the whole world later.  `install` therefore verifies every target right after applying
and raises `HookError` for the first one that did not take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from inspect import getattr_static
from types import ModuleType
from typing import Any

UPSTREAM_VERSION = "0.5.23"


class Kind(Enum):
    """How a hook wraps its target; the values are those of SGLang's ``HookType``."""

    BEFORE = "before"  # fn(*args, **kwargs) -> (args, kwargs) | None
    AFTER = "after"  # fn(result, *args, **kwargs) -> result | None (None keeps the result)
    AROUND = "around"  # fn(original, *args, **kwargs) -> result
    REPLACE = "replace"  # fn(*args, **kwargs) -> result


@dataclass(frozen=True)
class Hook:
    """One change to SGLang: what it targets, how, and why (one line)."""

    target: str
    kind: Kind
    fn: Callable[..., Any]
    why: str


class HookError(RuntimeError):
    """A hook did not take, or SGLang is not the version the hooks were written for."""


def check_version(found: str) -> None:
    """Raise `HookError` unless `found` is the pinned SGLang version."""
    if found != UPSTREAM_VERSION:
        raise HookError(
            f"sglang_afd hooks SGLang {UPSTREAM_VERSION}, but SGLang {found} is installed; "
            f"run: pip install sglang=={UPSTREAM_VERSION}"
        )


def install(hooks: Iterable[Hook]) -> list[str]:
    """Apply `hooks` through SGLang's registry and verify each; return the targets.

    Raises:
        HookError: a target does not exist, or is still the original after applying.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = list(hooks)
    before = {hook.target: _lookup(hook) for hook in hooks}
    for hook in hooks:
        HookRegistry.register(hook.target, hook.fn, HookType(hook.kind.value))
    with _imports_patched_together():
        HookRegistry.apply_hooks()
    for hook in hooks:
        if _lookup(hook) is before[hook.target]:
            raise HookError(
                f"the hook on {hook.target} ({hook.why}) did not take: SGLang still has its "
                f"original there; another plugin may have loaded first (see SGLANG_PLUGINS)"
            )
    return list(before)


@contextmanager
def _imports_patched_together() -> Iterator[None]:
    """Have SGLang's registry patch ``from module import function`` of all hooks in one pass.

    For each hook it would look at every name of every module: 5 CPU seconds in each process.

    Raises:
        HookError: two targets are names of the same function, so that each has one hook only.
    """
    from sglang.srt.plugins import hook_registry

    patches: dict[int, tuple[object, object]] = {}  # by the id of the original, which they keep
    twice: list[object] = []
    one_by_one = hook_registry._propagate_patch

    def note(original: object, wrapped: object, owner: object) -> int:
        if isinstance(owner, ModuleType):  # nobody imports a method
            if id(original) in patches:
                twice.append(original)
            patches[id(original)] = original, wrapped
        return 0  # how many were patched: SGLang only logs it

    hook_registry._propagate_patch = note
    try:
        yield
    finally:
        hook_registry._propagate_patch = one_by_one
    if twice:
        raise HookError(f"two targets name the same function, and one hook is lost: {twice}")
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if patch := patches.get(id(value)):
                    setattr(module, name, patch[1])


def _lookup(hook: Hook) -> object:
    """The raw attribute at the hook's target (descriptors of a class are not bound)."""
    owner_path, _, name = hook.target.rpartition(".")
    try:
        owner = _resolve(owner_path)
        return getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    except (ImportError, AttributeError, KeyError) as error:
        raise HookError(
            f"SGLang {UPSTREAM_VERSION} has no {hook.target} to hook ({hook.why}): {error!r}"
        ) from error


def _resolve(path: str) -> object:
    """The module or class at a dotted path; an error inside a module's import is not hidden."""
    parts = path.split(".")
    found: object = import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            module = ".".join(parts[:index])
            try:
                import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        found = getattr(found, part)
    return found
