"""tools/upstream_tests.py: which tests it runs, how it sees each end, and what a new failure is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "support" / "upstream_worker.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "upstream_tests", ROOT / "tools/upstream_tests.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["upstream_tests"] = module  # named tuples look their module up
    spec.loader.exec_module(module)
    return module


def test_the_tests_registered_for_cpus(tool: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "test" / "registered" / "unit"
    folder.mkdir(parents=True)
    for name, source in {
        "test_cpu": 'register_cpu_ci(est_time=5, suite="x")',
        "test_gpu": 'register_cuda_ci(est_time=5, stage="x")',
        "test_both": 'register_cuda_ci(est_time=5)\nregister_cpu_ci(est_time=5, suite="x")',
        "test_disabled": 'register_cpu_ci(est_time=5, suite="x", disabled="it fails")',
        "helpers": 'register_cpu_ci(est_time=5, suite="x")',
    }.items():
        (folder / f"{name}.py").write_text(source)
    assert [path.stem for path in tool.cpu_tests(tmp_path)] == ["test_both", "test_cpu"]
    assert [path.stem for path in tool.cpu_tests(tmp_path, "unit/test_c")] == ["test_cpu"]


@pytest.mark.parametrize(
    ("without", "within", "differs", "new"),
    [
        ("passed", "passed", False, False),
        ("failed", "failed", False, False),
        ("passed", "failed", True, True),
        ("skipped", "error", True, True),
        ("failed", "passed", True, False),
        ("failed", "error", True, False),
        ("passed", "skipped", True, False),
        ("passed", None, True, True),
        (None, "passed", True, False),
    ],
)
def test_a_new_failure(
    tool: ModuleType, without: str | None, within: str | None, differs: bool, new: bool
) -> None:
    sides: list[dict[str, dict[str, str]]] = [
        {"file": {"other": "passed", **({"test": outcome} if outcome else {})}}
        for outcome in (without, within)
    ]
    found = tool.differences(*sides)
    assert bool(found) is differs
    assert any(difference.new_failure for difference in found) is new
    text = tool.record(["fact"], sides, found, found)
    assert f"{int(new)} new failures with the package." in text
    assert ("| file test |" in text) is differs


def test_a_file_that_only_one_side_had_time_for_is_no_difference(tool: ModuleType) -> None:
    assert (
        tool.differences({"a": {"t": "passed"}, "b": {"t": "passed"}}, {"a": {"t": "passed"}}) == []
    )


TESTS = """
import os, signal, sys, time, unittest
import helper

def test_passes(): pass
def test_fails(): assert False
class TestIt(unittest.TestCase):
    def test_skips(self): self.skipTest("x")
    def setUp(self): print("noise")
"""
ENDINGS = {
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "exits": "import os; os._exit(0)",
    "hangs": "import time; time.sleep(60)",
    "leaves": "import subprocess; subprocess.Popen(['sleep', '61.7'])\ndef test_x(): pass",
}


def outcomes(path: Path, seconds: float) -> dict[str, str]:
    """What the worker's fork makes of a file; without SGLang's imports."""
    program = (
        f"import json, sys; sys.path.insert(0, {str(WORKER.parent)!r}); import upstream_worker\n"
        f"print(json.dumps(upstream_worker.outcomes({str(path)!r}, {seconds})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    return json.loads(done.stdout)


def test_outcomes_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "helper.py").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    assert outcomes(tmp_path / "test_some.py", 30) == {
        "test_some::test_passes": "passed",
        "test_some::test_fails": "failed",
        "test_some.TestIt::test_skips": "skipped",
    }


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("crashes", "killed by signal 11"),
        ("exits", "ended without a report"),
        ("hangs", "did not end in 5 s"),
    ],
)
def test_a_file_that_ends_otherwise(tmp_path: Path, ending: str, said: str) -> None:
    (tmp_path / "test_it.py").write_text(ENDINGS[ending])
    seconds = 5 if ending == "hangs" else 50
    assert outcomes(tmp_path / "test_it.py", seconds) == {"(whole file)": said}


def test_what_a_file_starts_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(ENDINGS["leaves"])
    assert outcomes(tmp_path / "test_it.py", 30) == {"test_it::test_x": "passed"}
    time.sleep(0.2)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 61.7" not in listed.splitlines()


ECHO = """
import json, sys
print(json.dumps({"ready": "9", "tree": "/t"}), flush=True)
for line in sys.stdin:
    file = json.loads(line)["file"]
    if file.endswith("dies.py"):
        sys.exit("it died")
    print(json.dumps({"file": file, "outcomes": {"t": sys.argv[1]}}), flush=True)
"""


def workers(tool: ModuleType, *answers: str, program: str = ECHO) -> list[Any]:
    sides = [tool.Side(answer, (sys.executable, "-c", program, answer), {}) for answer in answers]
    return [tool.Worker(side) for side in sides]


def test_both_sides_run_every_file(tool: ModuleType) -> None:
    both = workers(tool, "passed", "failed")
    for worker in both:
        worker.wait_ready(time.monotonic() + 20)
    found = tool.run_all(
        both, [Path("/r/a.py"), Path("/r/b.py")], time.monotonic() + 20, Path("/r")
    )
    assert found == [{f"{n}.py": {"t": side} for n in "ab"} for side in ("passed", "failed")]
    assert tool.run_all(both, [Path("/r/a.py")], time.monotonic() - 1, Path("/r")) == [{}, {}]
    for worker in both:
        worker.end()


def test_a_side_that_dies_ends_the_run_with_what_it_said(tool: ModuleType) -> None:
    both = workers(tool, "passed", "failed")
    for worker in both:
        worker.wait_ready(time.monotonic() + 20)
    with pytest.raises(SystemExit, match=r"passed: no answer within .*\nit died"):
        tool.run_all(both, [Path("/r/dies.py")], time.monotonic() + 20, Path("/r"))
    for worker in both:
        worker.end()
    (lost,) = workers(tool, "lost", program="raise SystemExit('no such module')")
    with pytest.raises(SystemExit, match="no such module"):
        lost.wait_ready(time.monotonic() + 20)
