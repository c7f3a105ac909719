"""The series of patches: what each changes, and what a tree of SGLang's files has of it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from sglang_afd.patches import unified_diff
from sglang_afd.patches.unified_diff import DiffError, FileDiff

FOLDER = Path(__file__).parent
_HEADER = ("Subject", "Reason", "Upstream")


class PatchError(RuntimeError):
    """A tree is not one that the series is for, or could not be written; nothing was changed."""


class State(Enum):
    """What a tree has of a patch."""

    ABSENT = "not applied"
    APPLIED = "applied"
    PARTLY = "partly applied"
    """Some of its files have the change and some do not: a run was ended in between."""
    UNKNOWN = "unknown tree"
    """A file is neither the one that the patch is of nor the one it makes."""


class Change(NamedTuple):
    """What a patch makes of one file, whose content it knows before and after."""

    diff: FileDiff
    before: str
    """sha256 of the content, in hexadecimal."""
    after: str

    @property
    def path(self) -> str:
        """Of the file, below the package's folder."""
        return self.diff.path


class Patch(NamedTuple):
    """One patch of the series."""

    name: str
    subject: str
    reason: str
    upstream: str
    """Where the change stands in SGLang's own repository."""
    changes: tuple[Change, ...]


def read_series(folder: Path = FOLDER) -> tuple[Patch, ...]:
    """All patches in `folder`, in the order of their names.

    Raises:
        PatchError: one cannot be read, or two change the same file.
    """
    patches = tuple(_read(path) for path in sorted(folder.glob("*.patch")))
    paths = [change.path for patch in patches for change in patch.changes]
    if len(paths) > len(set(paths)):
        raise PatchError(f"two patches of {folder} change the same file; make one of them")
    return patches


def _read(path: Path) -> Patch:
    """One patch: ``Name: value`` lines, continued by indented ones, and the diff."""
    text = path.read_text()
    header: dict[str, str] = {}
    name = ""
    for line in text.split("\n---", 1)[0].splitlines():
        if line.startswith(" ") and name:
            header[name] += f" {line.strip()}"
        else:
            name, _, value = line.partition(":")
            header[name] = value.strip()
    try:
        changes = tuple(
            Change(diff, header[f"Before {diff.path}"], header[f"After {diff.path}"])
            for diff in unified_diff.read(text)
        )
        subject, reason, upstream = (header[name] for name in _HEADER)
        return Patch(path.stem, subject, reason, upstream, changes)
    except (KeyError, DiffError) as error:
        raise PatchError(f"{path} cannot be read: {error}") from error


def find_package(tree: Path) -> Path:
    """The folder of SGLang's package in `tree`: itself, a folder with it, or a checkout.

    Raises:
        PatchError: there is none.
    """
    for package in (tree, tree / "sglang", tree / "python" / "sglang"):
        if (package / "srt" / "server_args.py").is_file():
            return package
    raise PatchError(f"{tree} is neither SGLang's package nor a checkout of its repository")


def state(patch: Patch, package: Path) -> State:
    """What the tree at `package` has of `patch`."""
    has = {_has(change, package) for change in patch.changes}
    if None in has:
        return State.UNKNOWN
    if len(has) > 1:
        return State.PARTLY
    return State.APPLIED if True in has else State.ABSENT


def _has(change: Change, package: Path) -> bool | None:
    """Whether a file has the change; None: it is another file."""
    with suppress(OSError):
        found = hashlib.sha256((package / change.path).read_bytes()).hexdigest()
        if found in (change.before, change.after):
            return found == change.after
    return None


def apply(patches: Sequence[Patch], package: Path) -> list[str]:
    """Apply `patches` where they are not; return the paths of the files changed.

    Raises:
        PatchError: the tree is unknown, or cannot be written; no file has changed.
    """
    return _change(patches, package, applied=True)


def revert(patches: Sequence[Patch], package: Path) -> list[str]:
    """Undo `patches` where they are applied; return the paths of the files changed.

    Raises:
        PatchError: the tree is unknown, or cannot be written; no file has changed.
    """
    return _change(patches, package, applied=False)


def _change(patches: Sequence[Patch], package: Path, *, applied: bool) -> list[str]:
    changes = [change for patch in patches for change in patch.changes]
    unknown = [change.path for change in changes if _has(change, package) is None]
    if unknown:
        raise PatchError(
            f"{package} is no tree that the series is for: {', '.join(unknown)} is neither the "
            f"file before its patch nor after it; nothing was changed"
        )
    turn: Callable[[FileDiff, str], str] = unified_diff.apply if applied else unified_diff.revert
    contents: dict[str, bytes] = {}
    for change in changes:
        if _has(change, package) is applied:
            continue
        content = turn(change.diff, (package / change.path).read_bytes().decode()).encode()
        wanted = change.after if applied else change.before
        if hashlib.sha256(content).hexdigest() != wanted:
            raise PatchError(f"{change.path}: the patch does not make what its header says")
        contents[change.path] = content
    _write(package, contents)
    return list(contents)


def _write(package: Path, contents: Mapping[str, bytes]) -> None:
    """Give files new contents: all of them, or none.

    Every content is written beside its file before the first takes its place; a file that other
    names share (a package manager's cache) keeps its content under those.
    """
    beside: dict[str, Path] = {}
    before = {path: (package / path).read_bytes() for path in contents}
    done: list[str] = []
    try:
        for path, content in contents.items():
            beside[path] = _written(package / path, content)
        for path, new in beside.items():
            os.replace(new, package / path)
            done.append(path)
    except OSError as error:
        for path in done:
            os.replace(_written(package / path, before[path]), package / path)
        raise PatchError(f"{package} cannot be written: {error}; nothing was changed") from error
    finally:
        for new in beside.values():
            new.unlink(missing_ok=True)


def _written(file: Path, content: bytes) -> Path:
    """A file beside `file` with this content, and its permissions."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    with os.fdopen(descriptor, "wb") as new:
        new.write(content)
        new.flush()
        os.fsync(descriptor)
    os.chmod(name, file.stat().st_mode)
    return Path(name)
