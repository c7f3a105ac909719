"""``python -m sglang_afd.demo``: two attention ranks, one FFN rank, one real answer.

Serves the embedded model on this machine, asks its OpenAI endpoint a question, streams the answer,
shows which rank holds what, keeps a trace of the steps, and stops everything.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from sglang_afd import embedded, trace
from sglang_afd.causes import INTERRUPTED
from sglang_afd.machine import this_machine
from sglang_afd.observe.holdings import Holdings, size
from sglang_afd.observe.trace import BadTrace
from sglang_afd.progress import Waiting, log_tick
from sglang_afd.running import Server, ServerFailed, serve
from sglang_afd.speculation import ALGORITHM, DRAFT, SERVED

_START_TIMEOUT = 400.0
_TRACED_STEPS = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m sglang_afd.demo",
        description=" ".join((__doc__ or "").split("\n\n")[1].split()),
    )
    parser.add_argument(
        "--attention-ranks",
        type=int,
        default=2,
        metavar="A",
        help="ranks with requests and attention (default: %(default)s)",
    )
    parser.add_argument(
        "--ffn-ranks",
        type=int,
        default=1,
        metavar="F",
        help="ranks with the experts; must divide the model's 12 (default: %(default)s)",
    )
    parser.add_argument(
        "--ask",
        default=embedded.SAMPLE_CHAT,
        metavar="QUESTION",
        help="what to ask; the model knows Python's documentation alone (default: %(default)s)",
    )
    parser.add_argument(
        "--draft",
        action="store_true",
        help="speculate with the model's own draft, and say what of it was accepted",
    )
    args = parser.parse_args(argv)
    console = Console()
    layout = f"{args.attention_ranks} attention ranks + {args.ffn_ranks} FFN ranks"
    deployment = [
        *("--afd-attention-ranks", str(args.attention_ranks)),
        *("--afd-ffn-ranks", str(args.ffn_ranks)),
    ]
    if args.draft:
        deployment += [ALGORITHM, SERVED, DRAFT[0], str(embedded.draft_path())]
    if len(this_machine().gpus) < args.attention_ranks + args.ffn_ranks:
        deployment += ["--device", "cpu"]
    logs = Path(tempfile.mkdtemp(prefix="sglang_afd-demo-"))
    console.print(f"Starting {layout}: [bold]python -m sglang_afd.launch_server[/]", *deployment)
    console.print(f"Model: {embedded.DESCRIPTION}.  Log: {logs}/demo.log", highlight=False)
    waiting = Waiting(console)
    tick = log_tick(waiting.update)
    try:
        with (
            waiting,
            serve("demo", deployment, logs=logs, timeout=_START_TIMEOUT, tick=tick) as server,
        ):
            waiting.stop()
            console.print(f"Ready after {server.start_seconds:.0f} s at {server.url}\n")
            trace.begin(server.url, _TRACED_STEPS)
            _ask(console, server, args.ask)
            _show(console, server)
            _keep_trace(console, server, logs)
    except ServerFailed as error:
        console.print(f"[bold red]{error}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    (logs / "demo.log").unlink()
    console.print(f"Stopped; no process is left.  {time.monotonic() - began:.0f} s in all.")
    return 0


def _ask(console: Console, server: Server, question: str) -> None:
    """Ask through the OpenAI client, printing the answer as it comes."""
    import openai

    console.print(f"[bold]{question}")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    began = time.monotonic()
    tokens, told = 0, None
    for part in client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=120,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_spec_tokens_details": True},
    ):
        more = (part.model_extra or {}).get("sglext") or {}
        told = more.get("spec_tokens_details") or told
        if part.usage is not None:
            tokens = part.usage.completion_tokens
        if part.choices:
            console.print(part.choices[0].delta.content or "", end="", markup=False)
    console.print(f"\n({tokens} tokens in {time.monotonic() - began:.1f} s)\n", highlight=False)
    if told is not None:
        console.print(_acceptance(tokens, told), highlight=False)


def _acceptance(tokens: int, told: dict[str, Any]) -> str:
    """What of a draft an answer of `tokens` tokens took, of which the prefill gave the first."""
    steps = told["spec_verify_ct"]
    histogram = told["spec_correct_drafts_histogram"]
    accepted = ", ".join(f"{count} x {right}" for right, count in enumerate(histogram) if count)
    return (
        f"Acceptance length {(tokens - 1) / steps:.2f} tokens a verify step: {tokens - 1} in "
        f"{steps} steps; drafted tokens accepted in them (steps x tokens): {accepted}\n"
    )


def _show(console: Console, server: Server) -> None:
    """Show what every rank holds."""
    ranks: list[dict[str, Any]] = server.call("/server_info")["internal_states"][0]["afd"]["ranks"]
    table = Table("rank", "experts a layer", "parameters", "weights", "KV tokens", "KV")
    for column in table.columns[1:]:
        column.justify = "right"
    for rank in msgspec.convert(ranks, list[Holdings]):
        table.add_row(
            rank.rank,
            str(rank.experts),
            f"{rank.parameters:,}",
            size(rank.weight_bytes),
            f"{rank.kv_tokens:,}",
            size(rank.kv_bytes),
        )
    console.print(table)


def _keep_trace(console: Console, server: Server, folder: Path) -> None:
    """Save what the ranks did while they answered, and say how their work overlapped."""
    file = folder / "trace.json"
    found = trace.recorded(server.url)
    trace.save(found, file)
    console.print(f"\n[bold]Decode steps[/] of this answer ({file}):", highlight=False)
    try:
        console.print(trace.describe(found), highlight=False)
    except BadTrace as reason:
        console.print(str(reason), highlight=False)
    console.print(
        f"python -m sglang_afd.trace {file} --plot step.png --perfetto steps.json draws them\n",
        highlight=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
