"""Draws the ranks and margins of a report, position by position."""

from __future__ import annotations

from pathlib import Path

from sglang_afd.validate.answers import BEYOND
from sglang_afd.validation.report import Report

_FORMATS = (".png", ".svg", ".pdf")


def problem(path: Path) -> str:
    """Why no plot can be drawn into `path`; empty: it can."""
    if path.suffix not in _FORMATS:
        return f"--plot {path} has no suffix of {', '.join(_FORMATS)}"
    if not path.absolute().parent.is_dir():
        return f"--plot: there is no folder {path.absolute().parent}"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "--plot needs matplotlib; run: pip install matplotlib"
    return ""


def draw(report: Report, path: Path) -> None:
    """Write the plot of `report` to `path`; its suffix says in which format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for result in report.results:
        label = f"{result.prompt} ({result.length} tokens)"
        positions = [result.length + i for i in range(result.tokens)]
        line = above.plot(positions, result.ranks, ".-", lw=0.5, ms=4, label=label)
        below.plot(positions, result.margins, ".-", lw=0.5, ms=4, color=line[0].get_color())
    above.set(yscale="log", ylim=(0.8, BEYOND * 1.3), ylabel="rank of the reference's token")
    tie = report.thresholds.near_tie
    below.set_yscale("symlog", linthresh=tie / 10)
    below.set(xlabel="position in the sequence", xscale="log")
    highest = max((margin for result in report.results for margin in result.margins), default=0.0)
    below.set_ylim(-tie / 20, 3 * max(tie, highest))
    below.set_ylabel("lead of the candidate's\nbest token, nats")
    below.axhline(tie, color="grey", lw=0.8, ls="--")
    above.set_title(
        f"{report.layout} against {report.reference.kind}: {report.verdict}", fontsize="medium"
    )
    if report.results:
        above.legend(title="prompt", fontsize="x-small", ncols=2, loc="upper right")
    figure.savefig(path, dpi=120)
