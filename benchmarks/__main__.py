"""``python -m benchmarks``: what there is to measure, measure it, and show what came out."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from benchmarks import configuration, pair, pair_requests, prompts, record, run, table
from benchmarks.compare import compare
from benchmarks.configuration import BadConfiguration, Configuration, Script, kind_of
from benchmarks.payloads import markdown
from benchmarks.record import BadRecord, Record
from benchmarks.results_folder import Found, look, state_of
from benchmarks.steps import SPREAD
from sglang_afd.causes import INTERRUPTED
from sglang_afd.validate.url import Remote

PROGRAM = "python -m benchmarks"
_DESCRIPTION = "Show what there is to measure, measure it, and show what came out."
_NONE_YET = ("spec", "cad")


def fail(message: str) -> NoReturn:
    """End the command: one readable error, status 2."""
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """The commands and their flags."""
    made = argparse.ArgumentParser(prog=PROGRAM, description=_DESCRIPTION)
    commands = made.add_subparsers(dest="command", required=True)

    def command(name: str, does: Callable[[argparse.Namespace], int], text: str) -> Callable:
        own = commands.add_parser(name, help=text, description=text)
        own.set_defaults(does=does)
        return own.add_argument

    add = command("list", _list, "Show the configurations, and which have been run.")
    add("--kind", choices=configuration.KINDS, help="only those of this kind")

    add = command("run", _run, "Run a configuration on this machine and write a record.")
    add("name", metavar="NAME", help="one that list shows, or a .yaml or .json file")
    add("--out", type=Path, metavar="DIR", help="folder of the record (default: today's, results)")
    add("--repeat", type=int, metavar="N", help="rounds, A B A B for 2 (default: as configured)")
    add("--systems", nargs="+", metavar="NAME", help="these of its systems, the baseline too")
    add("--reference", type=Path, metavar="FILE", help="record whose step times must be repeated")
    add("--work", type=Path, metavar="DIR", help="where logs go, kept on failure (default: /tmp)")

    add = command("compare", _compare, "Show two records side by side.")
    add("first", type=Path, metavar="A.json", help="a record")
    add("second", type=Path, metavar="B.json", help="another one")

    add = command("table", _table, "Write docs/performance.md and its plot.")
    add("folders", nargs="*", type=Path, metavar="DIR", help="of results (default: all there are)")
    add(
        "--out",
        type=Path,
        default=table.DOCUMENT,
        metavar="FILE",
        help="default: docs/performance.md",
    )

    add = command("prompts", _prompts, "Write seeded prompts of an exact number of tokens.")
    add("--tokenizer", type=Path, required=True, metavar="PATH", help="a model's tokenizer.json")
    add(
        "--tokens", type=int, default=prompts.SIZES[0], help="of each prompt (default: %(default)s)"
    )
    add("--count", type=int, default=prompts.COUNT, help="prompts (default: %(default)s)")
    add("--seed", type=int, default=1, help="what they are drawn from (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="FILE", help="JSON lines; must not be there yet")

    add = command("pair", _pair, "Ask two running endpoints the same: keep, tune or reject.")
    add("--baseline-url", required=True, metavar="URL", help="what there is now")
    add("--candidate-url", required=True, metavar="URL", help="what may take its place")
    add("--workload", type=Path, required=True, metavar="FILE", help="prompts, as `prompts` writes")
    add("--label", required=True, help="names the record; never one that is there already")
    add("--gpus", type=int, required=True, help="that each side takes; what they say must agree")
    add("--validation", type=Path, metavar="REPORT", help="passing report of sglang_afd.validate")
    add("--new-tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    add("--concurrency", type=int, default=32, help="requests at a time (default: %(default)s)")
    add("--repeat", type=int, default=2, metavar="N", help="rounds (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the order (default: %(default)s)")
    add("--timeout", type=float, default=600, help="seconds without a token (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="folder of the record (default: today's, results)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0: done and counting, 1: it does not count or is not kept, 2: cannot be."""
    args = parser().parse_args(argv)
    try:
        return args.does(args)
    except (BadConfiguration, BadRecord, prompts.NoTokenizer) as error:
        fail(str(error))
    except (pair.Taken, pair_requests.BadWorkload) as error:
        fail(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _list(args: argparse.Namespace) -> int:
    found = look([record.RESULTS]) if record.RESULTS.is_dir() else Found([], [])
    rows = [
        [name, kind_of(entry), state_of(name, entry, found)]
        for name, entry in configuration.load_all().items()
        if args.kind in (None, kind_of(entry))
    ]
    if rows:
        print("\n".join(markdown(["configuration", "kind", "state"], rows)))
    for kind in _NONE_YET:
        if args.kind in (None, kind):
            print(f"{kind}: no configuration yet")
    return 0


def _run(args: argparse.Namespace) -> int:
    name, chosen = _configuration(args.name)
    if args.repeat is not None and args.repeat < 1:
        fail(f"--repeat {args.repeat} is less than 1")
    if args.systems:
        chosen = _only(chosen, args.systems)
    reference = args.reference
    if reference is None and chosen.reference:
        reference = record.RESULTS / chosen.reference
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="benchmarks-", dir=args.work))
    print(f"Logs: {work}", flush=True)
    made = run.run(
        name,
        chosen,
        work=work,
        command=[PROGRAM, *sys.argv[1:]],
        rounds=args.repeat,
        reference=record.load(reference) if reference else None,
        draft=work / "draft.json",
    )
    file = record.save(made, _folder(args.out))
    _show(made)
    print(f"Record: {file}")
    failed = made.verdict.reference == record.FAIL or not made.verdict.counts
    if not failed:
        shutil.rmtree(work)
    return int(failed)


def _configuration(name: str) -> tuple[str, Configuration]:
    """A shipped configuration, or that of a file.

    Raises:
        BadConfiguration: there is none, or it stands for several.
    """
    file = Path(name)
    if file.suffix in (".yaml", ".yml", ".json"):
        found = configuration.load(file)
        if len(found) > 1:
            raise BadConfiguration(f"{file} stands for several; give one ratio in `ratios`")
        return next(iter(found.items()))
    shipped = configuration.load_all()
    if name not in shipped:
        close = [other for other in shipped if other.startswith(name)]
        hint = f"; perhaps {', '.join(close[:8])}" if close else "; `list` shows them"
        raise BadConfiguration(f"there is no configuration {name}{hint}")
    return name, shipped[name]


def _only(chosen: Configuration, names: list[str]) -> Configuration:
    if isinstance(chosen, Script):
        fail("--systems: a script's configuration has no systems")
    unknown = sorted(set(names) - set(chosen.systems))
    if unknown or chosen.baseline not in names:
        there = ", ".join(chosen.systems)
        fail(f"--systems: there are {there}, and the baseline {chosen.baseline} must be among them")
    kept = {name: system for name, system in chosen.systems.items() if name in names}
    return msgspec.structs.replace(chosen, systems=kept)


def _folder(out: Path | None) -> Path:
    return out or record.RESULTS / datetime.datetime.now(datetime.UTC).date().isoformat()


def _show(made: Record) -> None:
    rows = [
        [
            name,
            *(
                "-" if value is None else f"{value:,.4g}"
                for value in (own.step_ms, own.tokens_per_s_per_gpu, own.against_baseline)
            ),
        ]
        for name, own in made.figures.items()
    ]
    if rows:
        titles = ["system", "step, ms", "tokens/s/GPU", f"against {made.baseline}"]
        print("\n".join(markdown(titles, rows)))
    if made.verdict.counts:
        print("counts")
    for reason in made.verdict.reasons:
        print(f"does not count: {reason}")
    if made.reference:
        print(f"reference within {SPREAD:.0%}: {made.verdict.reference.upper()}")


def _compare(args: argparse.Namespace) -> int:
    print("\n".join(compare(record.load(args.first), record.load(args.second))))
    return 0


def _table(args: argparse.Namespace) -> int:
    for file in table.write(args.folders, args.out):
        print(f"wrote {os.path.relpath(file)}")
    return 0


def _prompts(args: argparse.Namespace) -> int:
    if min(args.count, args.tokens) < 1:
        fail("--count and --tokens must be at least 1")
    encode = prompts.tokenizer_of(args.tokenizer)
    made = prompts.prompts(encode, count=args.count, tokens=args.tokens, seed=args.seed)
    try:
        facts = prompts.write(args.out, made)
    except FileExistsError:
        fail(f"--out {args.out} is there already")
    print(f"{facts['prompts']} prompts of {args.tokens} tokens; sha256 {facts['sha256']}")
    return 0


def _pair(args: argparse.Namespace) -> int:
    for name in ("new_tokens", "concurrency", "repeat", "gpus"):
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} must be at least 1")
    file = pair.file_of(args.label, _folder(args.out))
    workload = pair_requests.read(
        args.workload, seed=args.seed, new_tokens=args.new_tokens, concurrency=args.concurrency
    )
    made = pair.run(
        args.label,
        Remote(args.baseline_url),
        Remote(args.candidate_url),
        workload,
        gpus=args.gpus,
        validation=args.validation,
        rounds=args.repeat,
        timeout=args.timeout,
        about={"file": args.workload.name, "seed": args.seed},
    )
    pair.save(made, file)
    if made.outcome.ranked:
        rows = [
            [name, *("-" if own[name] is None else f"{own[name]:.4g}" for own in _sides(made))]
            for name in made.figures["baseline"]
        ]
        print("\n".join(markdown(["figure", "baseline", "candidate"], rows)))
    print(f"{made.outcome.action}: {'; '.join(made.outcome.reasons)}")
    print(f"Record: {file}")
    return int(made.outcome.action != "keep")


def _sides(made: pair.Pair) -> tuple[dict, dict]:
    return made.figures["baseline"], made.figures["candidate"]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers, as Ctrl-C does
    raise SystemExit(main())
