"""Hooks go through SGLang's own registry; one that does not take stops the start with its name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_afd.upstream.hooks import (
    UPSTREAM_VERSION,
    Hook,
    HookError,
    Kind,
    check_version,
    install,
)

pytestmark = pytest.mark.unit

SOURCE = """
def double(x):
    return 2 * x

class Base:
    def inherited(self, x):
        return ("base", x)

    @classmethod
    def made(cls):
        return cls.__name__

    @staticmethod
    def plain(x):
        return x

class Child(Base):
    pass

class Sibling(Base):
    pass
"""


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    """An empty registry, whatever other tests registered."""
    hooks, patched = dict(HookRegistry._hooks), set(HookRegistry._patched)
    HookRegistry.reset()
    yield
    HookRegistry.reset()
    HookRegistry._hooks.update(hooks)
    HookRegistry._patched.update(patched)


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package ``fakelang`` with a module ``core`` to hook."""
    package, core = ModuleType("fakelang"), ModuleType("fakelang.core")
    package.__path__ = []  # type: ignore[attr-defined]
    exec(SOURCE, core.__dict__)
    package.core = core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fakelang", package)
    monkeypatch.setitem(sys.modules, "fakelang.core", core)
    return core


def hook(name: str, fn: Callable[..., Any], kind: Kind = Kind.AROUND) -> Hook:
    return Hook(f"fakelang.core.{name}", kind, fn, "the reason of this hook")


def plus_one(original: Callable[..., Any], *args: Any) -> Any:
    return original(*args) + 1


@pytest.mark.parametrize(
    ("kind", "fn", "expected"),
    [
        (Kind.BEFORE, lambda x: ((x + 1,), {}), 12),
        (Kind.BEFORE, lambda x: None, 10),
        (Kind.AFTER, lambda result, x: result + x, 15),
        (Kind.AFTER, lambda result, x: None, 10),
        (Kind.AROUND, plus_one, 11),
        (Kind.REPLACE, lambda x: -x, -5),
    ],
)
def test_every_kind_takes(upstream: Any, kind: Kind, fn: Callable[..., Any], expected: int) -> None:
    assert install([hook("double", fn, kind)]) == ["fakelang.core.double"]
    assert upstream.double(5) == expected


def test_importers_of_a_hooked_function_are_hooked_too(
    upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    importer = ModuleType("fakelang.importer")
    importer.mine = upstream.double  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fakelang.importer", importer)
    install([hook("double", plus_one)])
    assert importer.mine(5) == 11  # type: ignore[attr-defined]


def test_two_names_of_one_function_are_refused(upstream: Any) -> None:
    """Each would have one of the hooks, and importers either."""
    upstream.same = upstream.double
    with pytest.raises(HookError, match="two targets name the same function"):
        install([hook("double", plus_one), hook("same", plus_one)])


def test_modules_are_gone_through_once(upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each hook, which took most of a start."""

    class Counted(ModuleType):
        looks = 0

        @property
        def __dict__(self) -> dict[str, Any]:
            Counted.looks += 1
            return {}

    monkeypatch.setitem(sys.modules, "fakelang.counted", Counted("fakelang.counted"))
    names = ["double", "Base.inherited", "Base.made", "Base.plain"]
    install([hook(name, plus_one) for name in names])
    assert Counted.looks == 1


@pytest.mark.parametrize(
    "target",
    [
        "fakelang.core.missing",
        "fakelang.core.Base.missing",
        "fakelang.core.Missing.method",
        "fakelang.nowhere.double",
        "no_such_package.module.double",
    ],
)
def test_a_missing_target_is_named_and_nothing_is_hooked(upstream: Any, target: str) -> None:
    original = upstream.double
    with pytest.raises(HookError) as error:
        install([hook("double", plus_one), Hook(target, Kind.AFTER, print, "it counts")])
    assert f"SGLang {UPSTREAM_VERSION} has no {target} to hook (it counts)" in str(error.value)
    assert upstream.double is original
    HookRegistry.apply_hooks()
    assert upstream.double is original, "a hook stayed registered"


def test_an_import_that_fails_inside_a_target_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "afd_broken").mkdir()
    (tmp_path / "afd_broken" / "__init__.py").touch()
    (tmp_path / "afd_broken" / "part.py").write_text("import afd_absent_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookError, match=r"afd_broken\.part\.f .*afd_absent_dependency"):
        install([Hook("afd_broken.part.f", Kind.AFTER, print, "why")])


def test_a_target_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "afd_lazy").mkdir()
    (tmp_path / "afd_lazy" / "__init__.py").touch()
    (tmp_path / "afd_lazy" / "part.py").write_text("def f(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    install([Hook("afd_lazy.part.f", Kind.AROUND, plus_one, "why")])
    assert sys.modules["afd_lazy.part"].f(1) == 2


def test_a_hook_that_upstream_swallows_is_named(upstream: Any) -> None:
    """SGLang refuses to wrap a class, logs that, and goes on."""
    with pytest.raises(HookError) as error:
        install([hook("double", plus_one), hook("Base", plus_one)])
    assert "the hook on fakelang.core.Base (the reason of this hook) did not take" in str(
        error.value
    )
    assert "SGLANG_PLUGINS" in str(error.value)


@pytest.mark.parametrize("name", ["double", "Base.inherited", "Base.made", "Base.plain"])
def test_a_target_that_another_plugin_had_patched_is_named(upstream: Any, name: str) -> None:
    """SGLang patches a target once; a hook that comes later is registered and never applied."""
    install([hook(name, plus_one)])
    with pytest.raises(HookError, match=rf"fakelang\.core\.{name} .*did not take"):
        install([hook(name, plus_one)])
    assert upstream.double(5) == (11 if name == "double" else 10)


def test_several_hooks_of_one_target_all_take(upstream: Any) -> None:
    install([hook("double", plus_one), hook("double", lambda result, x: result * 10, Kind.AFTER)])
    assert upstream.double(5) == 110


def test_an_inherited_method_is_hooked_on_the_named_class_alone(upstream: Any) -> None:
    install([hook("Child.inherited", lambda result, self, x: (*result, "hooked"), Kind.AFTER)])
    assert upstream.Child().inherited(3) == ("base", 3, "hooked")
    assert upstream.Sibling().inherited(3) == ("base", 3)
    assert upstream.Base().inherited(3) == ("base", 3)


def test_class_and_static_methods_stay_what_they_are(upstream: Any) -> None:
    install(
        [
            hook("Base.made", lambda result, cls: result + "!", Kind.AFTER),
            hook("Base.plain", plus_one),
        ]
    )
    assert upstream.Base.made() == "Base!" and upstream.Child.made() == "Child!"
    assert upstream.Base.plain(1) == 2 and upstream.Base().plain(1) == 2


def test_another_sglang_version_is_refused_with_the_command_to_run() -> None:
    check_version(UPSTREAM_VERSION)
    with pytest.raises(HookError) as error:
        check_version("0.5.24")
    assert f"hooks SGLang {UPSTREAM_VERSION}, but SGLang 0.5.24 is installed" in str(error.value)
    assert f"pip install sglang=={UPSTREAM_VERSION}" in str(error.value)


def test_the_installed_sglang_is_the_pinned_one() -> None:
    from importlib.metadata import version

    check_version(version("sglang"))
