"""A trace as people look at it: for Perfetto, as a figure of one step, and in four numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang_afd.observe.stages import EXCHANGE, Stage
from sglang_afd.observe.trace import BadTrace, RankTrace, Trace, TracedStep

_SHADES = {
    Stage.ATTENTION: ("0.25", ""),
    Stage.EXPERTS: ("0.25", ""),
    Stage.MODEL: ("0.25", ""),
    Stage.DISPATCH: ("0.8", "///"),
    Stage.REPLY: ("0.8", "///"),
    Stage.COMBINE: ("0.97", "..."),
    Stage.RECEIVE: ("0.97", "..."),
}
"""Of a stage in the figure; readable in grey."""


class Overlap(NamedTuple):
    """How well the roles' work is hidden behind one another, in decode steps; seconds a step.

    docs/performance.md has the terms: efficiency is max(Ta, Te) / T_step.
    """

    steps: int
    """Decode steps it is made of: those that followed one another."""
    step: float
    """T_step: from one step's beginning to the next one's, all lanes taken together."""
    attention: float
    """Ta: own work of the busiest attention rank."""
    experts: float
    """Te: own work of the busiest FFN rank, or (CAD) model rank."""
    others: str = "experts"
    """What that rank's own work is."""

    @property
    def exposed(self) -> float:
        """What neither role's work explains."""
        return self.step - max(self.attention, self.experts)

    @property
    def efficiency(self) -> float:
        """Share of the step that the busier role's work explains."""
        return max(self.attention, self.experts) / self.step


def overlap(trace: Trace) -> Overlap:
    """The overlap in the trace's decode steps.

    Raises:
        BadTrace: no two of them followed one another, or nothing tells their stages.
    """
    leading, other = _roles(trace)
    per_role: dict[str, list[float]] = {"attention": [], other: []}
    intervals: list[float] = []
    untold: list[TracedStep] = []
    for rank in trace.ranks:
        followed = [step for step in _decodes(rank) if step.interval is not None]
        found = [step for step in followed if step.spans]
        if not found:
            untold += followed
            continue
        lanes = len({step.lane for step in found})
        own = statistics.fmean(_own_work(step) for step in found)
        per_role[rank.role].append(own * lanes)
        if rank.role == leading and len(found) > len(intervals):
            intervals = [step.interval for step in found if step.interval is not None]
    if untold:
        raise BadTrace(
            f"nothing tells the stages of step {untold[0].step_id} and the rank's others, replayed "
            f"from CUDA graphs; record more steps while requests run"
        )
    if not intervals or not all(per_role.values()):
        raise BadTrace(
            "no decode step in the trace followed another one on both roles; record more steps "
            "while requests run"
        )
    return Overlap(
        len(intervals),
        statistics.fmean(intervals),
        max(per_role["attention"]),
        max(per_role[other]),
        "experts" if other == "ffn" else "the rest of the model",
    )


def _roles(trace: Trace) -> tuple[str, str]:
    """The role that holds requests, and the one beside attention."""
    cad = any(rank.role == "model" for rank in trace.ranks)
    return ("model", "model") if cad else ("attention", "ffn")


def _decodes(rank: RankTrace) -> list[TracedStep]:
    return [step for step in rank.steps if step.path == "decode" and step.rows]


def _own_work(step: TracedStep) -> float:
    return sum(end - start for stage, start, end in step.spans if stage not in EXCHANGE)


def perfetto(trace: Trace) -> dict[str, Any]:
    """The trace in Chrome's event format (JSON object form), which ui.perfetto.dev opens."""
    return {
        "traceEvents": list(_events(trace)),
        "displayTimeUnit": "ms",
        "otherData": trace.versions,
    }


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    origin = min((step.start for rank in trace.ranks for step in rank.steps), default=0.0)
    for rank in trace.ranks:
        yield {"ph": "M", "pid": rank.rank, "name": "process_name", "args": {"name": rank.name}}
        yield {"ph": "M", "pid": rank.rank, "name": "process_sort_index", "args": {"v": rank.rank}}
        for lane in sorted({step.lane for step in rank.steps}):
            named = {"name": f"lane {lane}"}
            yield {"ph": "M", "pid": rank.rank, "tid": lane, "name": "thread_name", "args": named}
        for step in rank.steps:
            place = {"ph": "X", "pid": rank.rank, "tid": step.lane}
            facts = {"step": step.step_id, "rows": step.rows, "rounds": step.rounds}
            yield {
                **place,
                "name": f"{step.path} step {step.step_id}",
                "cat": step.path,
                **_time(step.start, step.end, origin),
                "args": facts,
            }
            for layer, (stage, start, end) in _with_layers(rank, step):
                yield {
                    **place,
                    "name": stage,
                    "cat": "stage",
                    **_time(start, end, origin),
                    "args": {"step": step.step_id, "layer": layer},
                }


def _time(start: float, end: float, origin: float) -> dict[str, float]:
    """Microseconds."""
    return {"ts": (start - origin) * 1e6, "dur": (end - start) * 1e6}


def _with_layers(
    rank: RankTrace, step: TracedStep
) -> Iterator[tuple[int | None, tuple[str, float, float]]]:
    """Each span with the MoE layer of its exchange; what follows the last one has none."""
    last = {Stage.COMBINE, Stage.REPLY}  # of an exchange
    done = 0
    for span in step.spans:
        layer = done // step.rounds
        yield (rank.layers[layer] if layer < len(rank.layers) else None), span
        done += span[0] in last


def draw(trace: Trace, file: Path) -> None:
    """Write a figure of one decode step: a row for each rank and lane; idle time stays white.

    Raises:
        BadTrace: the trace has no decode step with stages.
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    chosen = _middle_step(trace)
    begin, end = chosen.start, chosen.end + 0.1 * (chosen.end - chosen.start)
    rows = [(rank, lane) for rank in trace.ranks for lane in sorted({s.lane for s in rank.steps})]
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.55 * len(rows)), layout="constrained")
    for height, (rank, lane) in enumerate(reversed(rows)):
        for step in rank.steps:
            if step.lane != lane or step.end < begin or step.start > end:
                continue
            for stage, start, stop in step.spans:
                shade, hatch = _SHADES[Stage(stage)]
                axes.barh(
                    height,
                    (stop - start) * 1e3,
                    left=(start - begin) * 1e3,
                    height=0.75,
                    color=shade,
                    hatch=hatch,
                    edgecolor="black",
                    linewidth=0.3,
                )
    axes.set_yticks(
        range(len(rows)), [f"{rank.name}, lane {lane}" for rank, lane in reversed(rows)]
    )
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_xlabel(f"ms from the beginning of decode step {chosen.step_id}")
    axes.legend(
        handles=[
            Patch(facecolor=shade, hatch=hatch, edgecolor="black", label=label)
            for label, (shade, hatch) in (
                ("own work", _SHADES[Stage.ATTENTION]),
                ("dispatch / reply", _SHADES[Stage.DISPATCH]),
                ("combine / receive, with the wait", _SHADES[Stage.COMBINE]),
                ("idle", ("white", "")),
            )
        ],
        ncols=4,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
    )
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _middle_step(trace: Trace) -> TracedStep:
    """A decode step in the middle of those of the rank with requests that has most."""
    leading, _ = _roles(trace)
    candidates = [
        [step for step in _decodes(rank) if step.spans]
        for rank in trace.ranks
        if rank.role == leading
    ]
    steps = max(candidates, key=len, default=[])
    if not steps:
        raise BadTrace("the trace has no decode step with stages; record while requests run")
    return steps[len(steps) // 2]
