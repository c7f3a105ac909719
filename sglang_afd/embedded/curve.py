"""The picture of a training's losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot(curve: Sequence[Mapping[str, float]], target: Path, labels: Mapping[str, str]) -> None:
    """Draw the points of `curve` as a PNG, one line for each key of `labels`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label in labels.items():
        points = [p for p in curve if key in p]
        axes.plot([p["step"] for p in points], [p[key] for p in points], label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=100)
