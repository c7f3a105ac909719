"""The table of docs/reliability.md and the tests of failures are the same list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).resolve().parents[1]
ROWS = [
    line
    for line in (TESTS.parent / "docs" / "reliability.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| fault ")
]
FAILURES = "integration/test_failures.py"


def names_in(file: str) -> set[str]:
    """Names of the tests in a file."""
    tree = ast.parse((TESTS / file).read_text())
    names = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {name for name in names if name.startswith("test_")}


def named() -> list[tuple[str, str]]:
    """The file and name of each row's test."""
    found = [re.search(r"`([\w/]+\.py)::(\w+)` \|$", row) for row in ROWS]
    assert all(found), [row for row, test in zip(ROWS, found) if not test]
    return [(test[1], test[2]) for test in found if test]


def test_every_row_has_a_test() -> None:
    assert len(ROWS) > 20
    for file, name in named():
        assert name in names_in(file), f"{file} has no {name}"


def test_every_test_of_a_failure_has_a_row() -> None:
    assert names_in(FAILURES) == {name for file, name in named() if file == FAILURES}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_row_is_whole(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 5 and all(cells), row
