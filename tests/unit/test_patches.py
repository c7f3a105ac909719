"""The patch series and its command: all files or none, only on trees that it knows, any number of
times; and AFD's own hook is at peace with it."""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.patches import series, unified_diff
from sglang_afd.patches.__main__ import main
from sglang_afd.patches.series import Patch, PatchError, State, read_series

pytestmark = pytest.mark.unit

FIRST, SECOND = "srt/first.py", "srt/deep/second.py"
OLD = {FIRST: "one\ntwo\nthree\n", SECOND: "x = 1\n", "srt/server_args.py": "\n"}
NEW = {FIRST: "one\n2\nthree\nfour\n", SECOND: "x = 2\n"}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def diff(path: str, old: str, new: str) -> str:
    sides = (text.splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(*sides, f"a/{path}", f"b/{path}"))


def patch_text(*paths: str) -> str:
    head = ["Subject: a change", "Reason: it is", "  needed", "Upstream: not sent"]
    head += [f"Before {path}: {sha256(OLD[path])}" for path in paths]
    head += [f"After {path}: {sha256(NEW[path])}" for path in paths]
    return "\n".join([*head, "", *(diff(path, OLD[path], NEW[path]) for path in paths)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A series of one patch of two files."""
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "0001-both.patch").write_text(patch_text(FIRST, SECOND))
    return tmp_path / "series"


@pytest.fixture
def patches(folder: Path) -> tuple[Patch, ...]:
    return read_series(folder)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout's package, not patched."""
    package = tmp_path / "checkout" / "python" / "sglang"
    for path, content in OLD.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(content)
    return package


def contents(tree: Path) -> dict[str, str]:
    """Every file of the tree, whatever its name."""
    files = [path for path in tree.rglob("*") if path.is_file()]
    return {path.relative_to(tree).as_posix(): path.read_text() for path in files}


def test_header(patches: tuple[Patch, ...]) -> None:
    (patch,) = patches
    assert patch[:4] == ("0001-both", "a change", "it is needed", "not sent")
    assert [change.path for change in patch.changes] == [FIRST, SECOND]


def test_apply_and_revert_any_number_of_times(patches: tuple[Patch, ...], tree: Path) -> None:
    assert series.state(patches[0], tree) is State.ABSENT
    assert series.revert(patches, tree) == []
    for _ in range(2):
        assert series.apply(patches, tree) == [FIRST, SECOND]
        assert contents(tree) == {**OLD, **NEW}
        assert series.state(patches[0], tree) is State.APPLIED
        assert series.apply(patches, tree) == []
        assert series.revert(patches, tree) == [FIRST, SECOND]
        assert contents(tree) == OLD


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("path", [FIRST, SECOND])
@pytest.mark.parametrize("other", [None, "", "one\r\ntwo\r\nthree\r\n", "x = 1\n# mine\n"])
def test_an_unknown_tree_is_refused_whole(
    patches: tuple[Patch, ...], tree: Path, path: str, other: str | None, applied: bool
) -> None:
    """Whichever file it is, the other is not touched; a user's own change is kept."""
    if applied:
        series.apply(patches, tree)
    if other is None:
        (tree / path).unlink()
    else:
        (tree / path).write_bytes(other.encode())
    before = {p.name: p.read_bytes() for p in tree.rglob("*.py")}
    assert series.state(patches[0], tree) is State.UNKNOWN
    for turn in (series.apply, series.revert):
        with pytest.raises(PatchError, match=rf"{path} is neither .*; nothing was changed"):
            turn(patches, tree)
    assert {p.name: p.read_bytes() for p in tree.rglob("*.py")} == before


@pytest.mark.parametrize("turn", [series.apply, series.revert])
def test_a_run_that_was_ended_half_way_can_be_finished_or_undone(
    patches: tuple[Patch, ...], tree: Path, turn: Any
) -> None:
    (tree / SECOND).write_text(NEW[SECOND])
    assert series.state(patches[0], tree) is State.PARTLY
    turn(patches, tree)
    assert contents(tree) == ({**OLD, **NEW} if turn is series.apply else OLD)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", ["mkstemp", "replace"])
def test_all_files_or_none(
    patches: tuple[Patch, ...], tree: Path, monkeypatch: pytest.MonkeyPatch, step: str, nth: int
) -> None:
    """A disk that is full, or a file that may not be replaced, at any file."""
    owner = series.os if step == "replace" else series.tempfile
    real, calls = getattr(owner, step), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, step, failing)
    with pytest.raises(PatchError, match="No space left on device; nothing was changed"):
        series.apply(patches, tree)
    assert contents(tree) == OLD, "or a temporary file is left"


def test_a_shared_file_keeps_its_content_under_its_other_name(
    patches: tuple[Patch, ...], tree: Path, tmp_path: Path
) -> None:
    """Package managers link installed files to a cache that other environments share."""
    os.link(tree / FIRST, tmp_path / "cached")
    os.chmod(tree / FIRST, 0o640)
    series.apply(patches, tree)
    assert (tmp_path / "cached").read_text() == OLD[FIRST]
    assert stat.S_IMODE((tree / FIRST).stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Subject: x\n", "no file is changed"),
        (patch_text(FIRST).replace("Reason", "Cause"), "'Reason'"),
        (patch_text(FIRST).replace("After", "Afterwards"), f"'After {FIRST}'"),
        (patch_text(FIRST).replace(f"+++ b/{FIRST}", "+++ b/other"), "not the same file"),
        (patch_text(FIRST).rpartition("+four")[0], "a hunk is cut short"),
    ],
)
def test_a_patch_that_cannot_be_read_is_named(folder: Path, text: str, said: str) -> None:
    (folder / "0002-bad.patch").write_text(text)
    with pytest.raises(PatchError) as error:
        read_series(folder)
    assert "0002-bad.patch cannot be read: " in str(error.value) and said in str(error.value)


def test_a_patch_that_does_not_make_what_it_says_changes_nothing(folder: Path, tree: Path) -> None:
    text = patch_text(FIRST).replace("+four", "+five")
    (folder / "0001-both.patch").write_text(text)
    with pytest.raises(PatchError, match="does not make what its header says"):
        series.apply(read_series(folder), tree)
    assert contents(tree) == OLD


def test_two_patches_of_one_file_are_refused(folder: Path) -> None:
    (folder / "0002-again.patch").write_text(patch_text(FIRST))
    with pytest.raises(PatchError, match="change the same file"):
        read_series(folder)


LINES = st.lists(
    st.sampled_from(["a\n", "b\n", "- a/\n", "@@ -1 +1 @@\n", " \n", "\n"]), max_size=12
)


@given(LINES, LINES)
def test_a_diff_leads_there_and_back(old: list[str], new: list[str]) -> None:
    before, after = "".join(old), "".join(new)
    if before == after:
        return
    (file,) = unified_diff.read(diff("f", before, after))
    assert unified_diff.apply(file, before) == after
    assert unified_diff.revert(file, after) == before


def installed() -> Path:
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkout with those of the installed SGLang's files that the series is about."""
    paths = [change.path for patch in read_series() for change in patch.changes]
    for path in ("srt/server_args.py", *paths):
        target = tmp_path / "python" / "sglang" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((installed() / path).read_bytes())
    return tmp_path


def test_the_series_is_of_the_installed_sglang(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As users run it: listed, applied, applied again, undone; each file compiles."""
    before = contents(copied)

    def run(command: str) -> str:
        assert main([command, "--tree", str(copied)]) == 0
        return capsys.readouterr().out

    listed = run("list")
    for patch in read_series():
        assert f"{patch.name}: not applied" in listed
        assert patch.reason in listed and patch.upstream in listed
    assert "not applied" in run("check")
    changed = sum(len(patch.changes) for patch in read_series())
    assert f"apply: {changed} files changed" in run("apply")
    assert "apply: 0 files changed" in run("apply")
    assert ": applied\n" in run("check")
    for path, content in contents(copied).items():
        compile(content, path, "exec")
    assert f"revert: {changed} files changed" in run("revert")
    assert contents(copied) == before


def test_the_command_names_what_is_wrong(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = read_series()[0].changes[0].path
    with (copied / "python" / "sglang" / path).open("a") as file:
        file.write("# mine\n")
    for command in ("check", "apply", "revert"):
        assert main([command, "--tree", str(copied)]) == 1
    printed = capsys.readouterr()
    assert "unknown tree" in printed.out and f"{path} is neither the file" in printed.err
    assert main(["check", "--tree", str(tmp_path / "nowhere")]) == 1
    assert "is neither SGLang's package nor a checkout" in capsys.readouterr().err


def test_the_hook_keeps_what_a_patched_class_says(copied: Path) -> None:
    """The patch has MiniMax-M2 say what the hook would: the hook then changes nothing."""
    from sglang_afd.upstream.lm_head import HOOKS

    (patch,) = [patch for patch in read_series() if "lm-head" in patch.name]
    series.apply([patch], copied / "python" / "sglang")
    source = (copied / "python" / "sglang" / patch.changes[0].path).read_text()
    said = source.split("self.lm_head = ParallelLMHead(")[1].split(")\n        else")[0]
    assert "use_attn_tp_group=get_parallel().enable_dp_lm_head" in said
    calls: list[dict[str, Any]] = []
    for value in (True, False):
        HOOKS[0].fn(lambda *_, **kwargs: calls.append(kwargs), use_attn_tp_group=value)
    assert calls == [{"use_attn_tp_group": True}, {"use_attn_tp_group": False}]
