"""docs/troubleshooting.md quotes messages: each quoted piece is one that the code still says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "troubleshooting.md"
SOURCES = ("sglang_afd", "kernels", "spec", "benchmarks", "tools")
HOLE = "…"
"""Where a message has a value."""
ROWS = [
    line
    for line in DOCUMENT.read_text().splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| message"))
]


def messages_of(source: str) -> list[str]:
    """Every text in a program, with `HOLE` for the values of f-strings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else HOLE for p in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@cache
def messages() -> str:
    """All texts of the code, one after another."""
    files = (file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py")))
    return "\0".join(text for file in files for text in messages_of(file.read_text()))


def is_said(piece: str) -> bool:
    """Whether a message holds `piece`; what a hole of it stands for may be text in the code."""
    pattern = re.escape(piece).replace(re.escape(HOLE), "[^\0]*?")
    return re.search(pattern, messages()) is not None


@pytest.mark.parametrize("row", ROWS)
def test_quoted_messages_are_said(row: str) -> None:
    first = row.split("|")[1]
    quoted = re.findall(r"`([^`]+)`", first)
    assert quoted, "the first column quotes a message"
    for piece in quoted:
        assert is_said(piece), piece
        assert len(piece.replace(HOLE, "").strip()) >= 8, f"{piece} is too short to look for"


def test_every_row_has_cause_and_mend() -> None:
    assert len(ROWS) > 40
    for row in ROWS:
        assert len([cell for cell in row.split("|") if cell.strip()]) == 3, row


def test_what_nobody_says_is_noticed() -> None:
    assert messages_of('f"a {b} c" f"d"')[0] == "a … cd"
    assert not is_said("ranks that went " + "fishing")
    assert not is_said("experts do not divide over … attention " + "ranks")
