"""Unified diffs of text files: reading and applying them, exactly, without fuzz or offsets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class DiffError(ValueError):
    """A diff cannot be read, or is not of the text that it is applied to."""


class Hunk(NamedTuple):
    """Lines that take the place of others."""

    start: int
    """Index of the first old line."""
    old: tuple[str, ...]
    new: tuple[str, ...]


class FileDiff(NamedTuple):
    """The change of one file."""

    path: str
    """Below the folder that a diff is of, without the ``a/`` and ``b/`` of its two sides."""
    hunks: tuple[Hunk, ...]


def read(text: str) -> tuple[FileDiff, ...]:
    """The files that a diff changes; what stands before the first is left out.

    Raises:
        DiffError: there is none, or a hunk is cut short.
    """
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.startswith("--- a/")]
    if not starts:
        raise DiffError("no file is changed")
    ends = [*starts[1:], len(lines)]
    return tuple(_file(lines[start:end]) for start, end in zip(starts, ends))


def _file(lines: list[str]) -> FileDiff:
    path = lines[0].removeprefix("--- a/").strip()
    if len(lines) < 2 or lines[1].strip() != f"+++ b/{path}":
        raise DiffError(f"{path}: the two sides are not the same file")
    return FileDiff(path, tuple(_hunks(path, lines[2:])))


def _hunks(path: str, lines: list[str]) -> Iterator[Hunk]:
    rest = iter(lines)
    for line in rest:
        found = _HUNK.match(line)
        if not found:
            continue
        old: list[str] = []
        new: list[str] = []
        before, after = int(found[2] or 1), int(found[3] or 1)
        while len(old) < before or len(new) < after:
            part = next(rest, "")
            if not part or part[0] not in " -+":
                raise DiffError(f"{path}: a hunk is cut short")
            if part[0] in " -":
                old.append(part[1:])
            if part[0] in " +":
                new.append(part[1:])
        first = int(found[1]) if before == 0 else int(found[1]) - 1  # 0 lines: those after it
        yield Hunk(first, tuple(old), tuple(new))


def apply(diff: FileDiff, text: str) -> str:
    """`text` with the change made.

    Raises:
        DiffError: it is not the text that the diff is of.
    """
    return _replace(diff.path, text, diff.hunks)


def revert(diff: FileDiff, text: str) -> str:
    """`text`, which has the change, without it.

    Raises:
        DiffError: it is not what the diff leads to.
    """
    shift, turned = 0, []
    for start, old, new in diff.hunks:
        turned.append(Hunk(start + shift, new, old))
        shift += len(new) - len(old)
    return _replace(diff.path, text, tuple(turned))


def _replace(path: str, text: str, hunks: tuple[Hunk, ...]) -> str:
    lines = text.splitlines(keepends=True)
    for start, old, new in reversed(hunks):  # from the end, so that indices stay right
        if tuple(lines[start : start + len(old)]) != old:
            raise DiffError(f"{path}: line {start + 1} is not what the patch is of")
        lines[start : start + len(old)] = new
    return "".join(lines)
