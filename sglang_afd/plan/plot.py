"""The answer as a figure: throughput against A:F, a step's timeline, memory.  Readable in grey."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.search import Answer, Candidate
from sglang_afd.plan.verdict import simulated

_SHADES = {"weights": "0.35", "KV cache": "0.75", "buffers and graphs": "0.95"}
_HATCHES = ("", "///", "...", "xxx", "+++", "ooo", "\\\\\\", "***")
_SHOWN_LAYERS = 6


def check(file: Path) -> None:
    """Raises PlanError unless a figure can be written there."""
    if file.suffix not in (".png", ".svg"):
        raise PlanError("--plot", f"{file} ends with neither .png nor .svg")
    if not file.parent.is_dir():
        raise PlanError("--plot", f"there is no directory {file.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlanError("--plot", "needs matplotlib; pip install matplotlib") from None


def draw(answer: Answer, file: Path) -> None:
    """Write the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    _throughput(left, answer)
    split = answer.best("afd")
    if split is None:
        middle.text(0.5, 0.5, "no AFD layout", ha="center", va="center")
        middle.set_axis_off()
    else:
        _timeline(middle, answer, split)
    _memory(right, [c for c in (answer.best("colocated"), split) if c is not None])
    question = answer.question
    figure.suptitle(
        f"{question.shape.name}, {question.gpus} x {question.gpu.name}, "
        f"{question.load.context} tokens of context"
    )
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _throughput(axes: Any, answer: Answer) -> None:
    styles = {"afd": ("o", "-", "0.0"), "cad": ("s", "--", "0.45")}
    for kind, (marker, line, shade) in styles.items():
        best: dict[float, float] = {}
        for candidate in answer.by_layout():
            layout = candidate.layout
            if layout.kind == kind:
                ratio = layout.attention_ranks / layout.ffn_ranks
                best[ratio] = max(best.get(ratio, 0.0), candidate.per_gpu)
        if best:
            ratios = sorted(best)
            axes.plot(
                ratios, [best[r] for r in ratios], line, marker=marker, color=shade, label=kind
            )
    base = answer.best("colocated")
    if base is not None:
        axes.axhline(base.per_gpu, color="0.6", linestyle=":", label=base.layout.name)
    axes.set_xlabel("attention ranks per FFN rank")
    axes.set_ylabel("tokens/s/GPU")
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _timeline(axes: Any, answer: Answer, split: Candidate) -> None:
    found = simulated(answer, split, draws=False)
    for span in found.trace:
        if span.layer >= _SHOWN_LAYERS:
            continue
        row = 0 if span.role == "attention" else 1
        axes.barh(
            row,
            (span.end - span.start) * 1e6,
            left=span.start * 1e6,
            height=0.6,
            color=str(0.9 - 0.5 * (span.lane % 2)),
            edgecolor="black",
            linewidth=0.6,
            hatch=_HATCHES[span.lane % len(_HATCHES)],
        )
        axes.text(
            (span.start + span.end) / 2 * 1e6,
            row,
            f"{span.layer}.{span.lane}",
            ha="center",
            va="center",
            fontsize=6,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.set_yticks([0, 1], ["attention", "FFN"])
    axes.set_ylim(-0.6, 1.6)
    axes.set_xlabel(f"µs; layer.lane, the first {_SHOWN_LAYERS} layers")
    axes.set_title(split.layout.name)


def _memory(axes: Any, shown: list[Candidate]) -> None:
    names, columns = [], []
    for candidate in shown:
        layout = candidate.layout
        used = candidate.step.batch / layout.batch * layout.attention.kv
        names.append(f"{layout.name}\nattention" if layout.ffn else layout.name)
        memory = layout.attention
        columns.append((memory.weights, used, memory.buffers + memory.graphs))
        if layout.ffn:
            names.append(f"{layout.name}\nFFN")
            columns.append((layout.ffn.weights, 0.0, layout.ffn.buffers + layout.ffn.graphs))
    bottom = [0.0] * len(columns)
    for index, (part, shade) in enumerate(_SHADES.items()):
        heights = [column[index] / 1e9 for column in columns]
        axes.bar(
            names,
            heights,
            bottom=bottom,
            label=part,
            color=shade,
            edgecolor="black",
            hatch=_HATCHES[index],
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("GB a GPU")
    axes.set_ylim(top=1.25 * max(bottom))
    axes.legend(ncols=3, fontsize=8, loc="upper center")
