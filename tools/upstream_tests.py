"""Do SGLang's own CPU unit tests pass with this package as without it?

    python tools/upstream_tests.py CHECKOUT [--only TEXT] [--minutes M] [--records FOLDER]

CHECKOUT is one of SGLang's repository, at the installed version best.  Its tests that are
registered for SGLang's own CPU runs go through two interpreters at once: one where only SGLang is
installed, and this one, where SGLang has loaded this package's plugin with no deployment asked for,
so that it must change nothing, from a copy of SGLang with the patch series applied.  What differs
is run again on both sides; what then fails here again and not there is a new failure, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from sglang_afd.patches.__main__ import installed
from sglang_afd.patches.series import apply, read_series

WORKER = Path(__file__).resolve().parents[1] / "tests" / "support" / "upstream_worker.py"
FILE_SECONDS = 120.0
"""A file's tests take seconds; one that waits for what is not here must end too."""
START_SECONDS = 600.0
PROGRESS_SECONDS = 15.0
NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""A fork has only the thread that forks."""
_GOOD = ("passed", "skipped")

Outcomes = dict[str, dict[str, str]]
"""File -> test -> outcome."""


class Side(NamedTuple):
    """One of the two ways in which every test is run."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


class Difference(NamedTuple):
    """A test that has another outcome with the package than without it."""

    file: str
    test: str
    without: str
    within: str

    @property
    def new_failure(self) -> bool:
        """Whether it is the package's: without it the test does not fail."""
        return self.without in _GOOD and self.within not in _GOOD


def cpu_tests(checkout: Path, only: str = "") -> list[Path]:
    """The unit tests in `checkout` registered for SGLang's CPU runs, whose path has `only`."""
    folder = checkout / "test" / "registered"
    found = [path for path in sorted(folder.rglob("test_*.py")) if only in str(path)]
    return [path for path in found if _on_cpu(path.read_text())]


def _on_cpu(source: str) -> bool:
    """Whether a test file says ``register_cpu_ci(...)``, and not that it is disabled."""
    for node in ast.parse(source).body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "register_cpu_ci":
            return not any(word.arg == "disabled" for word in call.keywords)
    return False


def differences(without: Outcomes, within: Outcomes) -> list[Difference]:
    """What differs between two sides that ran the same files."""
    return [
        Difference(file, test, *pair)
        for file in sorted(without.keys() & within.keys())
        for test in sorted(without[file].keys() | within[file].keys())
        if len(set(pair := [side[file].get(test, "not run") for side in (without, within)])) > 1
    ]


class Worker:
    """A process that runs files of tests on one side."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the process fails)
        self._process = subprocess.Popen(
            side.command,
            env={**os.environ, **side.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def wait_ready(self, until: float) -> None:
        """Wait for its imports, by ``time.monotonic()`` `until` at most.

        Raises:
            SystemExit: it did not start; the message has what it printed.
        """
        ready = self._answer(until - time.monotonic())
        print(f"{self.side.name}: SGLang {ready['ready']} in {ready['tree']}", flush=True)

    def run(self, path: Path) -> dict[str, str]:
        """The outcome of each test of one file."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"file": str(path), "seconds": FILE_SECONDS}) + "\n")
        return self._answer(FILE_SECONDS + 60)["outcomes"]

    def end(self) -> None:
        """End the process; what it runs ends with it."""
        self._process.kill()
        self._process.wait()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, seconds))
        line = self._process.stdout.readline() if readable else ""
        if line:
            return json.loads(line)
        self.end()
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-15:]).strip()
        raise SystemExit(f"{self.side.name}: no answer within {seconds:.0f} s\n{tail}")


def run_all(
    workers: Sequence[Worker], files: list[Path], until: float, root: Path
) -> list[Outcomes]:
    """Run `files` on all sides at once, until ``time.monotonic()`` says `until`; show how far."""
    results: list[Outcomes] = [{} for _ in workers]

    def run(worker: Worker, done: Outcomes) -> None:
        for path in files:
            if time.monotonic() > until:
                return
            done[str(path.relative_to(root))] = worker.run(path)

    with ThreadPoolExecutor(len(workers)) as pool:
        sides = [pool.submit(run, worker, done) for worker, done in zip(workers, results)]
        while wait(sides, PROGRESS_SECONDS, FIRST_EXCEPTION).not_done:
            parts = [f"{w.side.name} {len(done)}" for w, done in zip(workers, results)]
            print(f"{', '.join(parts)} of {len(files)} files; {_count(results[-1])}", flush=True)
            if any(side.done() and side.exception() for side in sides):
                until = 0.0  # the other side is in vain
    for side in sides:
        side.result()
    return results


def _count(outcomes: Outcomes) -> str:
    counts = Counter(outcome for file in outcomes.values() for outcome in file.values())
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())


def the_sides(python: str, patched: str) -> list[Side]:
    """Without the package, in the interpreter `python`; with it and the tree at `patched`, here."""
    # What a user has set for servers of their own must not steer the tests.
    clean = {name: "" for name in os.environ if name.startswith("SGLANG_AFD")}
    clean |= NO_THREADS
    return [
        Side("without", (python, str(WORKER)), clean),
        Side("with", (sys.executable, str(WORKER), "--plugins"), {**clean, "PYTHONPATH": patched}),
    ]


def dependencies_python() -> str:
    """The interpreter of the environment that SGLang itself is installed in."""
    return str(installed().parents[3] / "bin" / "python")


def described(checkout: Path) -> str:
    """Which commit `checkout` is, as far as git knows."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=commit %H of %cs: %s"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no git checkout"


def record(
    facts: list[str], results: list[Outcomes], first: list[Difference], stay: list[Difference]
) -> str:
    """The record's Markdown text.

    Args:
        facts: what was run, a line each.
        results: without the package, and with it.
        first: what differed in the first run.
        stay: what differed again when run again.
    """
    new = [difference for difference in stay if difference.new_failure]
    lines = [f"# SGLang's own CPU unit tests, {date.today().isoformat()}", ""]
    lines += [f"{len(new)} new failures with the package.", ""]
    lines += [*(f"* {fact}" for fact in facts), ""]
    lines += ["| folder | files | without the package | with it |", "|---|---|---|---|"]
    for folder in sorted({_folder(file) for file in results[0]}):
        parts = [{f: o for f, o in r.items() if _folder(f) == folder} for r in results]
        lines.append(f"| {folder} | {len(parts[0])} | {_count(parts[0])} | {_count(parts[1])} |")
    lines.append(f"| all | {len(results[0])} | {_count(results[0])} | {_count(results[1])} |")
    lines += ["", f"Different in the first run: {len(first)}; again in the second: {len(stay)}."]
    if first:
        lines += ["", "| test | without | with | again |", "|---|---|---|---|"]
        again = {(d.file, d.test): f"{d.without}, {d.within}" for d in stay}
        for difference in first:
            file, test, without, within = difference
            repeat = again.get((file, test), "no difference")
            lines.append(f"| {file} {test} | {without} | {within} | {repeat} |")
    return "\n".join([*lines, ""])


def _folder(file: str) -> str:
    """The part of the tests that a file belongs to, as test/registered/unit/managers."""
    return "/".join(Path(file).parts[:4][: len(Path(file).parts) - 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of SGLang's repository")
    parser.add_argument("--only", default="registered/unit", help="part of the files' paths")
    parser.add_argument("--minutes", type=float, default=90.0, help="end after so many")
    parser.add_argument("--records", type=Path, help="write a dated record to this folder")
    parser.add_argument("--plain", default=dependencies_python(), help="Python without the package")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    files = cpu_tests(checkout, options.only)
    if not files:
        parser.error(f"no CPU tests in {checkout}/test/registered with {options.only!r} in a path")
    began = time.monotonic()
    until = began + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        names = patched_copy(Path(folder))
        workers = [Worker(side) for side in the_sides(options.plain, folder)]
        try:
            for worker in workers:
                worker.wait_ready(began + START_SECONDS)
            results = run_all(workers, files, until, checkout)
            first = differences(*results)
            again = [checkout / file for file in sorted({d.file for d in first})]
            repeated = run_all(workers, again, until + 600, checkout)
        finally:
            for worker in workers:
                worker.end()
    named = {(d.file, d.test) for d in first}
    stay = [d for d in differences(*repeated) if (d.file, d.test) in named]
    facts = [
        f"tests of {described(checkout)}",
        f"{min(len(side) for side in results)} of {len(files)} files, {options.only}, on both "
        f"sides at once, a process each; {time.monotonic() - began:.0f} s",
        f"patches applied: {', '.join(names)}",
    ]
    text = record(facts, results, first, stay)
    print(text)
    if options.records:
        target = options.records / f"upstream-{date.today().isoformat()}.md"
        target.write_text(text)
        print(f"record: {target}")
    return 1 if any(difference.new_failure for difference in stay) else 0


def patched_copy(folder: Path) -> list[str]:
    """Copy the installed SGLang into `folder`, patched; return the names of the patches."""
    series = read_series()
    shutil.copytree(installed(), folder / "sglang")
    apply(series, folder / "sglang")
    return [patch.name for patch in series]


if __name__ == "__main__":
    raise SystemExit(main())
