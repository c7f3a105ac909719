"""``python -m sglang_afd.validate``: does a deployment give the model's answers?"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_afd.causes import INTERRUPTED
from sglang_afd.progress import Waiting
from sglang_afd.start import fail
from sglang_afd.validate import plot
from sglang_afd.validate.command import Impossible, parser, resolve
from sglang_afd.validate.run import run
from sglang_afd.validation import report
from sglang_afd.validation.report import Report

PROGRAM = "validate"
CHECK = "check"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns 0 for a pass, 1 for a failure."""
    args = list(sys.argv[1:] if argv is None else argv)
    return _check(args[1:]) if args[:1] == [CHECK] else _validate(args)


def _check(argv: Sequence[str]) -> int:
    checker = argparse.ArgumentParser(
        prog=f"python -m sglang_afd.{PROGRAM} {CHECK}",
        description="Read a report again: exits with 0 if it passes, 1 if it fails, 2 if it is "
        "unreadable or contradicts itself.",
    )
    checker.add_argument("report", type=Path, metavar="REPORT", help="a report that was written")
    path = checker.parse_args(argv).report
    try:
        found = report.read(path)
    except report.BadReport as error:
        fail(f"{PROGRAM} {CHECK}", str(error))
    if wrong := report.check(found):
        fail(f"{PROGRAM} {CHECK}", f"{path} contradicts itself: {'; '.join(wrong)}")
    _show(Console(), found)
    return 0 if found.verdict == report.PASS else 1


def _validate(argv: Sequence[str]) -> int:
    own, passed_on = parser().parse_known_args(argv)
    console = Console()
    if own.plot is not None and (problem := plot.problem(own.plot)):
        fail(PROGRAM, problem)
    try:
        if own.work is not None:
            own.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(PROGRAM, f"--work {own.work} cannot be made: {error.strerror or error}")
    work = Path(tempfile.mkdtemp(prefix="sglang_afd-validate-", dir=own.work))
    try:
        settings = resolve(own, passed_on, work, program=PROGRAM)
    except Impossible as error:
        work.rmdir()
        fail(PROGRAM, str(error))
    except SystemExit:
        work.rmdir()
        raise
    console.print(f"Logs and recordings: {work}", highlight=False)
    try:
        with Waiting(console) as waiting:
            found = run(settings, argv, waiting)
    except KeyboardInterrupt:
        return INTERRUPTED
    _show(console, found)
    try:
        report.write(found, own.out)
        if own.plot is not None:
            plot.draw(found, own.plot)
    except OSError as error:
        console.print(f"Cannot be written: {error}; make room and run it again", highlight=False)
        return 1
    console.print(f"Report: {own.out}", highlight=False)
    if found.verdict == report.PASS:
        shutil.rmtree(work)
        return 0
    return 1


def _show(console: Console, found: Report) -> None:
    figures = Table("figure", "value", "limit", title=f"{found.layout}: {found.reference.kind}")
    limits = found.thresholds
    for name, value in found.figures.items():
        limit = getattr(limits, name, None)
        shown = "nothing" if value is None else f"{value:.6g}"
        figures.add_row(name.replace("_", " "), shown, "" if limit is None else f"{limit:g}")
    console.print(figures)
    console.print(f"Layers: {escape(found.layers.note)}", highlight=False)
    colour = "green" if found.verdict == report.PASS else "bold red"
    console.print(f"[{colour}]{found.verdict.upper()}[/]  ({found.thresholds.precision})")
    for reason in found.reasons:
        console.print(f"  {escape(reason)}", highlight=False)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers, as Ctrl-C does
    raise SystemExit(main())
