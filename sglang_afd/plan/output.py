"""The answer as a table and words, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_afd.plan.arrivals import Latencies
from sglang_afd.plan.search import Answer, Candidate
from sglang_afd.plan.verdict import Verdict

_COLUMNS = (
    *("layout", "lanes", "batch/GPU", "tok/s/GPU", "TPOT ms", "Ta ms", "Te ms", "exposed ms"),
    *("KV GB", "FFN GB"),
)


def table(answer: Answer, rows: int) -> Table:
    """The best batch of each layout, the best `rows` of them."""
    found = Table(*_COLUMNS)
    for column in found.columns[1:]:
        column.justify = "right"
    for candidate in answer.by_layout()[:rows]:
        found.add_row(*_cells(candidate))
    return found


def _cells(candidate: Candidate) -> list[str]:
    layout, step = candidate.layout, candidate.step
    milliseconds = (step.tpot, step.ta, step.te, step.exposed)
    return [
        escape(layout.name),
        str(step.lanes),
        f"{step.batch:g}",
        f"{step.per_gpu:.0f}",
        *(f"{seconds * 1e3:.1f}" for seconds in milliseconds),
        f"{layout.attention.kv / 1e9:.0f}",
        f"{layout.ffn.weights / 1e9:.0f}" if layout.ffn else "",
    ]


def show(
    console: Console,
    answer: Answer,
    found: Verdict,
    *,
    rows: int,
    latencies: Latencies | None = None,
    command: str | None = None,
) -> None:
    """Print what was asked, the table, refusals and the verdict."""
    question = answer.question
    shape, gpu, load = question.shape, question.gpu, question.load
    known = "measured" if gpu.measured else "datasheet figures, not measured"
    console.print(
        escape(
            f"{shape.name} ({'FP8' if shape.fp8 else f'{8 * shape.itemsize} bit'}) on "
            f"{question.gpus} x {gpu.name} ({known}); prompts of {load.context}, outputs of "
            f"{load.output}"
            + (f", TPOT at most {question.tpot * 1e3:g} ms" if question.tpot else "")
        )
    )
    if answer.by_layout():
        console.print(table(answer, rows))
    if answer.refused:
        console.print("Cannot be:")
        for refused in answer.refused[:rows]:
            console.print(escape(f"  {refused.name}: {refused.reason}"))
        if len(answer.refused) > rows:
            console.print(f"  and {len(answer.refused) - rows} more (--json lists all)")
    console.print(f"\n[bold]{escape(found.headline)}[/]")
    for reason in found.reasons:
        console.print(escape(f"  {reason}"))
    if found.missing:
        phrases = ", ".join(found.missing)
        console.print(
            escape(f"  This build does not serve yet: {phrases} (--as-built plans without).")
        )
    if latencies is not None:
        console.print(escape(f"  {_words(latencies)}"))
    if command is not None:
        groups = found.choice.layout.groups if found.choice else 1
        console.print(f"\nStart {'it' if groups == 1 else f'each of its {groups} groups'} with:")
        console.print(command, markup=False, highlight=False, soft_wrap=True)


def _words(latencies: Latencies) -> str:
    ttft, tpot = (
        " / ".join(f"{1e3 * value:.0f}" for value in values)
        for values in (latencies.ttft, latencies.tpot)
    )
    return (
        f"At {latencies.rate:g} requests/s for each attention rank: TTFT {ttft} ms, TPOT {tpot} ms "
        f"(50, 90, 99 %), goodput {latencies.goodput:.0%}."
    )


def as_json(
    answer: Answer, found: Verdict, *, latencies: Latencies | None, command: str | None
) -> dict[str, Any]:
    """Everything, in seconds and bytes."""
    question = answer.question
    return {
        "model": question.shape.name,
        "architecture": question.shape.architecture,
        "gpu": {"name": question.gpu.name, "measured": question.gpu.measured},
        "gpus": question.gpus,
        "workload": asdict(question.load),
        "tpot_target": question.tpot,
        "transport": question.transport,
        "verdict": {
            "headline": found.headline,
            "reasons": list(found.reasons),
            "choice": _row(found.choice) if found.choice else None,
            "missing": list(found.missing),
        },
        "layouts": [_row(candidate) for candidate in answer.by_layout()],
        "pareto": [_row(candidate) for candidate in answer.pareto()],
        "refused": [asdict(refused) for refused in answer.refused],
        "latencies": asdict(latencies) if latencies else None,
        "launch": command,
    }


def _row(candidate: Candidate) -> dict[str, Any]:
    layout, step = candidate.layout, candidate.step
    return {
        "layout": layout.name,
        "kind": layout.kind,
        "attention_ranks": layout.attention_ranks,
        "ffn_ranks": layout.ffn_ranks,
        "groups": layout.groups,
        "lanes": step.lanes,
        "batch": step.batch,
        "tokens_per_second_per_gpu": step.per_gpu,
        "tpot": step.tpot,
        "step": step.seconds,
        "ta": step.ta,
        "te": step.te,
        "exchange": step.exchange,
        "exposed": step.exposed,
        "overlap_efficiency": step.overlap_efficiency,
        "attention_memory": asdict(layout.attention),
        "ffn_memory": asdict(layout.ffn) if layout.ffn else None,
    }
