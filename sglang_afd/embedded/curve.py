"""What both trainings share: the learning rate over the steps, and the picture of the losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path


def learning_rate(step: int, steps: int, *, warmup: int, peak: float, final: float) -> float:
    """Linear warm-up, over a tenth of the steps at most, then a cosine from `peak` to `final`."""
    warmup = min(warmup, max(1, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    fraction = (step - warmup) / max(1, steps - warmup)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * fraction))


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
