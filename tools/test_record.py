"""Turn pytest's JUnit report into a dated record: `test_record.py reports/full.xml tests/records`.

The record is Markdown: what was tested (commit, packages, cores), how long each suite took, how
long the servers took to start, and a table with one row per test: outcome, seconds, and the message
of what did not pass. Of the report's fields it leaves out the host's name.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
PACKAGES = ("sglang-afd", "sglang", "torch", "transformers", "safetensors", "numpy", "pytest")


class Case(NamedTuple):
    """One test of the report."""

    name: str
    suite: str
    """The folder of tests that it lies in."""
    outcome: str
    seconds: float
    note: str
    properties: list[tuple[str, str]]

    @classmethod
    def of(cls, element: ElementTree.Element) -> Case:
        """Read a `testcase` element."""
        outcome, note = "passed", ""
        for child in element:
            if child.tag in OUTCOMES:
                outcome = OUTCOMES[child.tag]
                note = (child.get("message") or "").partition("\n")[0][:120]
        where = element.get("classname", "")
        parts = where.split(".")
        return cls(
            name=f"{where}::{element.get('name')}",
            suite=parts[1] if parts[0] == "tests" and len(parts) > 2 else "other",
            outcome=outcome,
            seconds=float(element.get("time", 0)),
            note=note,
            properties=[(p.get("name", ""), p.get("value", "")) for p in element.iter("property")],
        )


def record(report: Path, day: date, tested: list[str]) -> str:
    """The record's text; `tested` are lines that say what was tested, and on what."""
    root = ElementTree.parse(report).getroot()
    cases = [Case.of(element) for element in root.iter("testcase")]
    counts = Counter(case.outcome for case in cases)
    summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    wall = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    head = [f"# Full test run, {day.isoformat()}", "", f"{summary} in {wall:.0f} s.", ""]
    lines = [*head, *(f"* {line}" for line in tested), ""]
    lines += table(("suite", "tests", "seconds"), _suites(cases))
    if demo := [value for case in cases for name, value in case.properties if name == "demo"]:
        lines += [f"`make demo` took {demo[-1]} s.", ""]
    if starts := list(_starts(cases)):
        middle = median(float(seconds) for _, seconds, _ in starts)
        lines += [f"{len(starts)} servers, forked from one process; median {middle:.1f} s:", ""]
        lines += table(("started by", "seconds", "cores taken by others"), starts)
    rows = ((case.name, case.outcome, f"{case.seconds:.1f}", case.note) for case in cases)
    return "\n".join([*lines, *table(("test", "outcome", "seconds", "note"), rows)])


def table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table, and an empty one."""
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        lines.append(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |")
    return [*lines, ""]


def _suites(cases: list[Case]) -> Iterator[tuple[str, str, str]]:
    """Each suite with its number of tests and their seconds; tests run one after another."""
    by_suite: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        by_suite[case.suite].append(case.seconds)
    for suite, seconds in sorted(by_suite.items()):
        yield suite, str(len(seconds)), f"{sum(seconds):.0f}"


def _starts(cases: list[Case]) -> Iterator[tuple[str, str, str]]:
    for case in cases:
        for name, value in case.properties:
            if name == "world start":
                seconds, others = value.split()
                yield case.name, seconds, f"{float(others):.0%}"


def tested() -> list[str]:
    """The commit, whether the tree differs from it, the packages, and the cores."""
    commit = _git("rev-parse", "HEAD") or "no commit"
    dirty = _git("status", "--porcelain")
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    return [
        f"commit {commit}, {'with uncommitted changes' if dirty else 'no uncommitted changes'}",
        f"Python {platform.python_version()}, {', '.join(versions)}",
        f"{len(os.sched_getaffinity(0))} cores",
    ]


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def free_name(folder: Path, day: date) -> Path:
    """A file of the day that does not exist yet: the second run's ends in ``-2``."""
    target, number = folder / f"{day.isoformat()}.md", 1
    while target.exists():
        number += 1
        target = folder / f"{day.isoformat()}-{number}.md"
    return target


def main() -> None:
    report, folder = Path(sys.argv[1]), Path(sys.argv[2])
    day = date.today()
    folder.mkdir(parents=True, exist_ok=True)
    target = free_name(folder, day)
    target.write_text(record(report, day, tested()))
    print(f"record: {target}")


if __name__ == "__main__":
    main()
