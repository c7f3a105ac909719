"""Run files of SGLang's tests, each in a fork of one process that imported SGLang first.

A program for `tools/upstream_tests.py`, which starts it with one interpreter or another.  It reads
a request a line, ``{"file": PATH, "seconds": N}``, and answers
``{"file": PATH, "outcomes": {...}}``,
an outcome a test.  With ``--plugins`` it has SGLang load its plugins before it forks.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

PACKAGE = "sglang_afd"
WHOLE_FILE = "(whole file)"
"""In a test's place: the file ended, or did not end, without a report."""
_BAD = {"failure": "failed", "error": "error", "skipped": "skipped"}


def preload() -> None:
    """Import what nearly every test imports, before a thread exists."""
    import pytest  # noqa: F401
    from sglang.test.test_utils import maybe_stub_sgl_kernel

    maybe_stub_sgl_kernel()  # as the tests of modules that import CUDA kernels begin
    import sglang.srt.managers.scheduler
    import sglang.srt.server_args  # noqa: F401


def check_plugins(wanted: bool) -> None:
    """Exit unless this interpreter has the package as asked; load SGLang's plugins if wanted."""
    installed = PACKAGE in entry_points(group="sglang.srt.plugins").names
    if installed is not wanted:
        sys.exit(f"{sys.executable} {'has' if installed else 'lacks'} {PACKAGE}")
    if wanted:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        if f"{PACKAGE}.plugin" not in sys.modules:
            sys.exit(f"SGLang did not load its plugin {PACKAGE}")


def run_file(path: str, report: str) -> int:
    """In the fork: run one file's tests with pytest, writing a JUnit report."""
    import pytest

    folder = Path(path).parent
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # tests import helpers that lie beside them
    # nothing of the folder that this program was started in: plug-ins, settings, markers
    options = ["-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-q"]
    return pytest.main([*options, f"--junit-xml={report}", path])


def outcomes(path: str, seconds: float) -> dict[str, str]:
    """Fork for one file, for `seconds` at most; the outcome of each of its tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setsid()
                log = os.open(os.devnull, os.O_RDWR)
                for descriptor in range(3):
                    os.dup2(log, descriptor)
                code = run_file(path, report)
            finally:
                os._exit(code)
        ending = _ending(child, seconds)
        if ending is not None or not os.path.exists(report):
            return {WHOLE_FILE: ending or "ended without a report"}
        found = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            bad = [_BAD[child.tag] for child in case if child.tag in _BAD]
            found[f"{case.get('classname')}::{case.get('name')}"] = bad[0] if bad else "passed"
        return found


def _ending(child: int, seconds: float) -> str | None:
    """Wait for the fork; None if it ended by itself, else how.  Its own children end with it."""
    deadline = time.monotonic() + seconds
    status = None
    while time.monotonic() < deadline:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            status = code
            break
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return f"did not end in {seconds:g} s"
    return f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else None


def main() -> None:
    check_plugins("--plugins" in sys.argv)
    preload()
    if len(threads := os.listdir("/proc/self/task")) > 1:
        sys.exit(f"importing SGLang started {len(threads) - 1} threads; forks of it may hang")
    import sglang

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # both sides have none
    gc.collect()
    gc.freeze()  # or each fork's first collection copies every page that holds an object
    print(json.dumps({"ready": sglang.__version__, "tree": sglang.__path__[0]}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"file": request["file"]}
        answer["outcomes"] = outcomes(request["file"], request["seconds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
