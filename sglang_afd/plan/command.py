"""``python -m sglang_afd.plan``: the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from sglang_afd.config import ConfigError
from sglang_afd.plan import output, plot, profile, shape
from sglang_afd.plan.arrivals import Latencies, serve
from sglang_afd.plan.errors import PlanError, whole
from sglang_afd.plan.layouts import Layout
from sglang_afd.plan.ledger import TRANSPORTS
from sglang_afd.plan.modes import contract
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.search import Answer, Question, search
from sglang_afd.plan.verdict import launch_command, verdict
from sglang_afd.plan.workload import Workload

PROGRAM = "plan"
_LONG = 400
"""Layouts from which on progress is shown."""
_DESCRIPTION = """\
Does attention-FFN disaggregation pay here, with which ratio, and what will it deliver?

Predicts a decode step of every layout of the GPUs (colocated expert parallelism of each width,
every A:F, core-attention disaggregation), lanes and batch size, from the model's config.json and a
GPU's profile alone, and says which is best and why. No GPU is needed.

Figures are those of the design: CUDA graphs, and several lanes in flight. What this build does not
serve of it is said; --as-built plans with what it does. How the model works, where its figures come
from and what it misses: docs/planner.md."""
_EPILOG = """\
`python -m sglang_afd.plan calibrate --help` tells how to measure this machine's GPUs.

example:
  python -m sglang_afd.plan --model-path qwen3-235b-a22b-fp8 --gpus 16 --gpu h200 --context 8192"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 with one error line if an input cannot be right."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args[:1] == ["calibrate"]:
            from sglang_afd.plan.calibrate import main as calibrate

            return calibrate(args[1:])
        return _plan(_parser().parse_args(args))
    except (PlanError, ConfigError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_afd.plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, models = parser.add_argument, ", ".join(shape.shipped())
    add(
        "--model-path",
        required=True,
        metavar="CONFIG",
        help=f"config.json, checkpoint directory, name on the Hugging Face Hub, or one of {models}",
    )
    add(
        "--gpu",
        default="h200",
        metavar="NAME|FILE",
        help=f"a profile: {', '.join(profile.shipped())}, or a file that calibrate wrote "
        "(default: %(default)s)",
    )
    add(
        "--domain",
        type=int,
        metavar="N",
        help="GPUs that reach each other at full speed, where it is not the profile's (8 of an HGX "
        "host, 72 of an NVL72)",
    )
    add("--gpus", type=int, required=True, metavar="N", help="how many GPUs")
    add("--context", type=int, required=True, metavar="TOKENS", help="tokens of a prompt")
    add(
        "--output",
        type=int,
        default=512,
        metavar="TOKENS",
        help="tokens generated for a prompt (default: %(default)s)",
    )
    add("--tpot-ms", type=float, metavar="MS", help="most time a token may take (default: any)")
    add(
        "--transport",
        choices=TRANSPORTS,
        default="nvlink",
        help="how rows travel between the roles; fused is what a kernel like FastAFD's would reach "
        "(default: %(default)s)",
    )
    add(
        "--lanes",
        type=int,
        nargs="+",
        metavar="N",
        help="decode batches in flight at once to try (default: 1 2 3)",
    )
    add(
        "--kv-bytes",
        type=int,
        default=2,
        metavar="BYTES",
        help="bytes of a KV cache element: 2, or 1 for FP8 (default: %(default)s)",
    )
    add(
        "--skew",
        type=float,
        default=0.0,
        metavar="S",
        help="Zipf exponent of the experts' popularity; 0: all alike (default: %(default)g)",
    )
    add(
        "--verify-width",
        type=int,
        default=1,
        metavar="ROWS",
        help="rows of a request in a step: with speculative decoding, its draft tokens and one "
        "(default: %(default)s)",
    )
    add(
        "--accepted",
        type=float,
        default=1.0,
        metavar="TOKENS",
        help="tokens a request gains in a step with speculative decoding (default: %(default)g)",
    )
    add(
        "--rate",
        type=float,
        metavar="R",
        help="also play arrivals of R requests a second in all: TTFT, TPOT and goodput",
    )
    add(
        "--ttft-ms",
        type=float,
        metavar="MS",
        help="most time to the first token that counts as goodput (with --rate)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of routing and arrivals (default: 0)")
    add(
        "--as-built",
        action="store_true",
        help="AFD with the lanes and graphs that this build serves",
    )
    add("--rows", type=int, default=10, metavar="N", help="rows of the table (default: 10)")
    add("--json", action="store_true", help="print everything as JSON, and nothing else")
    add("--plot", type=Path, metavar="FILE", help="write a figure: FILE.png or FILE.svg")
    add("--launch", action="store_true", help="print the command that starts the chosen layout")
    return parser


def question_of(args: argparse.Namespace) -> Question:
    """What the command line asks.

    Raises:
        PlanError: it cannot be asked.
    """
    model = shape.read_shape(args.model_path)
    lanes, graphs = tuple(args.lanes or (1, 2, 3)), True
    kinds: tuple[str, ...] = ("colocated", "afd", "cad")
    if args.as_built:
        sync, more = (contract(mode, transport=args.transport) for mode in ("sync", "async"))
        lanes = tuple(n for n in lanes if n in (*sync.lanes, *more.lanes))
        graphs, kinds = sync.graphs, ("colocated", "afd")
        if not lanes:
            raise PlanError("--lanes", f"this build serves {sync.lanes[-1]} lane only")
    gpu = profile.read_profile(args.gpu)
    if args.domain is not None:
        gpu = dataclasses.replace(gpu, domain=whole("--domain", args.domain, most=4096))
    return Question(
        shape=model,
        gpu=gpu,
        gpus=args.gpus,
        load=Workload(args.context, args.output, args.verify_width, args.accepted, args.kv_bytes),
        routing=Routing(model.experts, model.top_k, args.skew, args.seed),
        tpot=args.tpot_ms / 1e3 if args.tpot_ms is not None else None,
        transport=args.transport,
        lanes=lanes,
        kinds=kinds,
        graphs=graphs,
    )


def _plan(args: argparse.Namespace) -> int:
    if args.plot is not None:
        plot.check(args.plot)
    if args.rows < 1:
        raise PlanError("--rows", f"{args.rows} is not at least 1")
    if args.seed < 0:
        raise PlanError("--seed", f"{args.seed} is negative")
    errors = Console(stderr=True)
    answer = search(question_of(args), watch=lambda tried: _progress(tried, errors))
    found = verdict(answer)
    command = None
    if args.launch and found.choice is not None:
        command = launch_command(answer, found.choice, args.model_path)
    latencies = _latencies(args, answer)
    if args.plot is not None:
        plot.draw(answer, args.plot)
        errors.print(f"wrote {args.plot}", highlight=False)
    if args.json:
        content = output.as_json(answer, found, latencies=latencies, command=command)
        print(json.dumps(content, indent=1))
        return 0
    output.show(
        Console(width=None if sys.stdout.isatty() else 110),
        answer,
        found,
        rows=args.rows,
        latencies=latencies,
        command=command,
    )
    return 0


def _latencies(args: argparse.Namespace, answer: Answer) -> Latencies | None:
    choice = verdict(answer).choice
    if args.rate is None or choice is None:
        return None
    return serve(
        answer.question,
        choice,
        rate=args.rate / (choice.layout.attention_ranks * choice.layout.groups),
        seed=args.seed,
        ttft_target=args.ttft_ms / 1e3 if args.ttft_ms is not None else None,
    )


def _progress(tried: list[Layout], console: Console) -> Iterable[Layout]:
    if len(tried) < _LONG or not console.is_terminal:
        return tried
    from rich.progress import track

    return track(tried, "layouts", console=console, transient=True)
