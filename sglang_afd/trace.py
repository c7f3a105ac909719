"""``python -m sglang_afd.trace``: record the next steps of a running server, and look at them.

Records from a server (``--url``) or reads a trace that was saved; prints how well the roles' work
overlaps; ``--perfetto`` writes a file for ui.perfetto.dev, ``--plot`` a figure of one step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_afd.observe import timeline
from sglang_afd.observe.trace import BadTrace, Trace, expert_counts, read
from sglang_afd.placement import COUNT

_DESCRIPTION = (
    "Record the next steps of a running server, or read a trace that was saved, and look at them: "
    "prints how well the roles' work overlaps; --perfetto writes a file for ui.perfetto.dev, "
    "--plot a figure of one step."
)


class NoAnswer(Exception):
    """The server cannot be asked; the message says what it said."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 if there is no trace to look at."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.file is None:
            trace = record(arguments.url, arguments.steps, arguments.wait, arguments.api_key)
        else:
            trace = read(arguments.file)
        if arguments.save:
            save(trace, arguments.save)
        if arguments.perfetto:
            arguments.perfetto.write_text(json.dumps(timeline.perfetto(trace)))
        if arguments.expert_counts:
            arguments.expert_counts.write_text(json.dumps({COUNT: expert_counts(trace)}))
        if arguments.plot:
            timeline.draw(trace, arguments.plot)
        print(describe(trace))
    except (BadTrace, NoAnswer, OSError) as error:
        print(f"trace: error: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print("trace: error: --plot needs matplotlib; pip install matplotlib", file=sys.stderr)
        return 2
    return 0


def record(url: str, steps: int, wait: float, api_key: str | None = None) -> Trace:
    """Let the server at `url` record, until every rank that takes part has enough.

    Args:
        wait: seconds; what was recorded until then is returned.

    Raises:
        NoAnswer: the server refuses, or cannot be reached.
        BadTrace: it answers with something else than a trace.
    """
    begin(url, steps, api_key)
    deadline = time.monotonic() + wait
    while True:
        trace = recorded(url, api_key)
        counts = [len(rank.steps) for rank in trace.ranks]
        complete = any(counts) and all(count in (0, steps) for count in counts)
        if complete or time.monotonic() > deadline:
            return trace
        time.sleep(0.5)


def begin(url: str, steps: int, api_key: str | None = None) -> None:
    """Let the server at `url` record the next steps of every rank; raises as `record`."""
    _ask("POST", f"{url.rstrip('/')}/afd/trace?steps={steps}", api_key)


def recorded(url: str, api_key: str | None = None) -> Trace:
    """What the server at `url` has recorded so far; raises as `record`."""
    answer = _ask("GET", f"{url.rstrip('/')}/afd/trace", api_key)
    try:
        return msgspec.json.decode(answer, type=Trace)
    except msgspec.DecodeError as error:
        raise BadTrace(f"{url} answers with no trace: {error}") from error


def save(trace: Trace, file: Path) -> None:
    """Write a trace as a file that `sglang_afd.observe.trace.read` reads."""
    file.write_bytes(msgspec.json.encode(trace))


def describe(trace: Trace) -> str:
    """What the trace says, in words."""
    lines = [f"{rank.name}: {len(rank.steps)} of {rank.asked} steps" for rank in trace.ranks]
    found = timeline.overlap(trace)
    step, attention, experts, exposed = (
        f"{seconds * 1e3:.3f} ms"
        for seconds in (found.step, found.attention, found.experts, found.exposed)
    )
    lines += [
        f"decode step {step} (mean of {found.steps}): attention {attention}, "
        f"{found.others} {experts}, exposed {exposed}",
        f"overlap efficiency {found.efficiency:.2f}: the share of a step that the busier role's "
        f"own work explains",
    ]
    return "\n".join(lines)


def _ask(method: str, url: str, api_key: str | None) -> bytes:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        told = error.read().decode(errors="replace")[:300]
        raise NoAnswer(f"{method} {url}: {error.code} {told}") from error
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{method} {url}: {error}; is the server up there?") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang_afd.trace", description=_DESCRIPTION)
    parser.add_argument("file", nargs="?", type=Path, help="a trace that --save wrote")
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="of a running server (default: %(default)s)"
    )
    parser.add_argument("--api-key", help="the server's key, if it was started with one")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of each rank to record (default: %(default)s)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        help="seconds to wait for them at most; ranks only step while requests run (default: 60)",
    )
    parser.add_argument("--save", type=Path, help="write the trace there, as JSON")
    parser.add_argument("--perfetto", type=Path, help="write a JSON for ui.perfetto.dev there")
    parser.add_argument(
        "--expert-counts",
        type=Path,
        help="write how many rows each expert got there, for --afd-expert-placement",
    )
    parser.add_argument("--plot", type=Path, help="write a figure of one step there: .png or .svg")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
