"""Two processes of a benchmark: what rank 0 measured comes back, or why there is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.ranks import run_pair

pytestmark = pytest.mark.unit


def pair(patch: pytest.MonkeyPatch, folder: Path, source: str, seconds: float = 60) -> Any:
    """Run a module of that source, which finds its arguments in `args`, as both ranks."""
    reads = "import json, sys, time\nargs = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    (folder / "some_benchmark.py").write_text(reads + source)
    patch.setenv("PYTHONPATH", str(folder))
    return run_pair("some_benchmark", "--hidden", "7", seconds=seconds)


def test_rank_0s_result_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writes = "if args['--rank'] == '0': open(args['--out'], 'w').write(json.dumps(args))"
    result = pair(monkeypatch, tmp_path, writes)
    assert result["--hidden"] == "7" and result["--rank"] == "0"


def test_a_failure_says_what_each_rank_ended_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = "print('more', file=sys.stderr)\nif args['--rank'] == '1': sys.exit('no such device')"
    assert pair(monkeypatch, tmp_path, fails) == {
        "failed": "exit codes [0, 1]; rank 0: more; rank 1: no such device"
    }


def test_ranks_that_take_too_long_are_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = pair(monkeypatch, tmp_path, "time.sleep(600)", seconds=0.5)
    assert result == {"failed": "not done within 0.5 s; rank 0: nothing; rank 1: nothing"}
