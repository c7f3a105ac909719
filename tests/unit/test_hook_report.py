"""Which hooks fit another SGLang: found in its sources, however they define or import a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_afd import hook_report
from sglang_afd.hook_report import Fit, Row, Sources, fit, main, used
from sglang_afd.patches.__main__ import installed

pytestmark = pytest.mark.unit

FILES = {
    "srt/server_args.py": "",
    "srt/base.py": """
class Base:
    limit: int = 3

    def inherited(self, x):
        return x

class Middle(Base):
    pass
""",
    "srt/core.py": """
import sys
from sglang.srt import base
from sglang.srt.base import Middle as Parent
from sglang.srt.many import *
from .base import Base

if sys.platform == "linux":
    def either(x):
        return 1
else:
    def either(x):
        return 2

try:
    import fast
except ImportError:
    fast = None

class Child(Parent):
    def own(self, a, *, b=1):
        return a

class Generic(base.Base):
    pass

first, (second, third) = 1, (2, 3)
""",
    "srt/many/__init__.py": "from .part import inner\nfrom .missing import nowhere\n",
    "srt/many/part.py": "def inner():\n    pass\n",
}
CORE = "sglang.srt.core"


def tree(folder: Path, **changed: str) -> Path:
    """The files as a package ``sglang``; `changed` replaces that of core.py, say."""
    package = folder / "sglang"
    for path, text in FILES.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(changed.get(Path(path).stem, text))
    return package


@pytest.mark.parametrize(
    "name",
    [
        CORE,
        "sglang.srt.many",
        "sglang.srt",
        f"{CORE}.Child",
        f"{CORE}.Child.own",
        f"{CORE}.Child.inherited",
        f"{CORE}.Child.limit",
        f"{CORE}.Generic.inherited",
        f"{CORE}.Base.inherited",
        f"{CORE}.either",
        f"{CORE}.fast",
        f"{CORE}.sys",
        f"{CORE}.inner",
        f"{CORE}.third",
        "sglang.srt.many.part.inner",
    ],
)
def test_found(tmp_path: Path, name: str) -> None:
    assert Sources(tree(tmp_path)).find(name)


@pytest.mark.parametrize(
    "name", [f"{CORE}.gone", f"{CORE}.Child.gone", f"{CORE}.either.own", "sglang.srt.gone.own"]
)
def test_missing(tmp_path: Path, name: str) -> None:
    assert Sources(tree(tmp_path)).find(name) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        (f"{CORE}.Child.own", "return a", "return  a  # the same", Fit.SAME),
        (f"{CORE}.Child.own", "return a", "return -a", Fit.BODY),
        (f"{CORE}.Child.own", "b=1", "b=2", Fit.ARGUMENTS),
        (f"{CORE}.Child.own", "a, *, b=1", "a, *, b=1, c=2", Fit.ARGUMENTS),
        (f"{CORE}.Child.own", "def own", "def renamed", Fit.MISSING),
        (f"{CORE}.Child.own", "return a", "return b", Fit.BODY),
        (f"{CORE}.Child.inherited", "Middle as", "Other as", Fit.MISSING),
        (f"{CORE}.either", "return 2", "return 3", Fit.BODY),
        (f"{CORE}.inner", "from sglang.srt.many import *", "", Fit.MISSING),
    ],
)
def test_compared(tmp_path: Path, name: str, old: str, new: str, expected: Fit) -> None:
    assert old in FILES["srt/core.py"]
    here = Sources(tree(tmp_path / "here"))
    there = Sources(tree(tmp_path / "there", core=FILES["srt/core.py"].replace(old, new)))
    assert fit(here.find(name), there.find(name)) is expected


def test_every_name_is_found_in_the_installed_sglang() -> None:
    """The look-up must not call a name missing that Python would find."""
    sources = Sources(installed())
    names = used()
    assert len(names) > 100 and any(why.startswith("hook") for why in names.values())
    assert [name for name in names if not sources.find(name)] == []


def test_exit_status_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*fits: Fit) -> tuple[int, str]:
        rows = [Row(f"sglang.n{i}", found, "hook: why") for i, found in enumerate(fits)]
        monkeypatch.setattr(hook_report, "report", lambda *_: rows)
        return main([str(tree(tmp_path))]), capsys.readouterr().out

    assert run(Fit.SAME, Fit.SAME) == (0, "2 names: 2 same\n")
    status, printed = run(Fit.SAME, Fit.BODY)
    assert status == 0 and "| `sglang.n1` | other body | hook: why |" in printed
    for bad in (Fit.MISSING, Fit.ARGUMENTS):
        status, printed = run(Fit.BODY, bad)
        assert status == 1 and printed.splitlines()[4].startswith("| `sglang.n1` ")


def test_a_folder_without_sglang_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is neither SGLang's package nor a checkout" in capsys.readouterr().err
