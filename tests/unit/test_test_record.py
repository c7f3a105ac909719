"""The record of a full run names what was tested, and no run overwrites another's."""

from __future__ import annotations

import importlib.util
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
DAY = date(2026, 1, 31)
REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" time="70.4" hostname="secret">
<testcase classname="tests.unit.test_a" name="test_one[a|b]" time="0.25" />
<testcase classname="tests.unit.test_a" name="test_two" time="1.5">
<failure message="assert 1 == 2&#10;more">trace</failure></testcase>
<testcase classname="tests.integration.test_b" name="test_three" time="60.0">
<properties><property name="world start" value="9.5 0.02" />
<property name="world start" value="12.5 0.40" /></properties></testcase>
<testcase classname="tests.integration.test_demo" name="test_demo" time="8">
<properties><property name="demo" value="61" /></properties></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_record", ROOT / "tools" / "test_record.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_record(module: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "full.xml"
    report.write_text(REPORT)
    text = module.record(report, DAY, ["commit abc", "2 cores"])
    for line in (
        "1 failed, 3 passed in 70 s.",
        "* commit abc",
        "* 2 cores",
        "| unit | 2 | 2 |",
        "| integration | 2 | 68 |",
        "`make demo` took 61 s.",
        "2 servers, forked from one process; median 11.0 s:",
        "| tests.integration.test_b::test_three | 12.5 | 40% |",
        "| tests.unit.test_a::test_one[a\\|b] | passed | 0.2 |  |",
        "| tests.unit.test_a::test_two | failed | 1.5 | assert 1 == 2 |",
    ):
        assert line in text.splitlines(), text
    assert "secret" not in text


def test_a_second_run_of_a_day_gets_a_name_of_its_own(module: ModuleType, tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        target = module.free_name(tmp_path, DAY)
        target.touch()
        names.append(target.name)
    assert names == ["2026-01-31.md", "2026-01-31-2.md", "2026-01-31-3.md"]


def test_what_was_tested_is_named(module: ModuleType) -> None:
    commit, packages, cores = module.tested()
    assert "uncommitted changes" in commit
    assert "sglang 0.5.23" in packages and "torch" in packages
    assert cores.split()[0].isdecimal()
