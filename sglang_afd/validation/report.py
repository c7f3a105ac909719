"""The report of a validation: what was compared, with what, what came out, and the verdict.

The verdict is a function of the rest (`judge`): reading a report judges it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from sglang_afd.validation.thresholds import Thresholds
from sglang_afd.whole_file import write_whole

VERSION = 1
CHECKPOINT = "checkpoint_identity"
"""In the candidate's configuration: what tells its checkpoint from others in moments."""
PASS, FAIL = "pass", "fail"
Side = Literal["candidate", "reference"]


class BadReport(ValueError):
    """A file that is no report; the message says why."""


class _Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of the report; an unknown or missing field makes it unreadable."""


class Identity(_Part):
    """What answered on one side."""

    kind: str
    """``afd``, ``hf``, ``sglang`` or ``url``."""
    configuration: dict[str, Any]
    """The command line or the address, and what the server says of itself."""
    checkpoint: dict[str, str]
    """The sha256 of each file that decides the answers; empty where it cannot be seen."""
    software: dict[str, Any]
    """See `sglang_afd.validate.environment`; empty where it cannot be seen."""


class Asked(_Part):
    """The prompts."""

    name: str
    seed: int
    sha256: str
    lengths: list[int]
    new_tokens: int
    of_text: bool


class Problem(_Part):
    """Something that was not answered, or not as it was asked."""

    side: Side
    prompt: int | None
    what: str


class PromptResult(_Part):
    """One prompt, compared; lists have one entry a token of the reference's continuation."""

    prompt: int
    length: int
    tokens: int
    first_divergence: int | None
    """The first token that the two greedy continuations do not share; None: they are equal."""
    divergence_gap: float | None
    """By how much the reference prefers its own token to its second best there, in nats; None also
    where the reference does not tell."""
    decode_errors: list[float]
    """Logprob errors of the candidate's greedy tokens, as far as they are equal."""
    ranks: list[int]
    """The candidate's rank of each reference token, under teacher forcing."""
    margins: list[float]
    errors: list[float]
    """Logprob errors under teacher forcing, in nats."""


class LayerError(_Part):
    """How far one MoE layer's rows are from the reference's, relative to their length.

    Rows whose experts differ between the two sides are counted, not measured.
    """

    layer: int
    rows: int
    rerouted: int
    input_largest: float
    input_p90: float
    output_largest: float
    output_p90: float


class Layers(_Part):
    """The MoE layers, compared; and where an error begins."""

    available: bool
    note: str
    """One sentence: where the error begins, or why that is not known."""
    layers: list[LayerError]
    first_layer: int | None = None
    last_layer: int | None = None
    """The error begins between the experts' output of a right layer before `first_layer`'s experts
    and `last_layer`'s output; None: no layer is wrong."""
    suspects: list[int] = []
    """Experts that all wrong rows of `last_layer` went to."""


NO_LAYERS = Layers(available=False, note="no layers were compared", layers=[])


class Report(_Part):
    """All of it."""

    version: int
    created: str
    command: list[str]
    seconds: float
    layout: str
    candidate: Identity
    reference: Identity
    asked: Asked
    thresholds: Thresholds
    problems: list[Problem]
    results: list[PromptResult]
    layers: Layers
    figures: dict[str, float | int | None]
    """`figures_of` the results."""
    verdict: Literal["pass", "fail"]
    reasons: list[str]
    """Why it failed, or in one line what passed."""


def figures_of(results: list[PromptResult], layers: Layers) -> dict[str, float | int | None]:
    """The figures that thresholds hold against, over all prompts; None: there is nothing."""
    ranks = [rank for result in results for rank in result.ranks]
    errors = [error for result in results for error in result.errors]
    decode = [error for result in results for error in result.decode_errors]

    def share(limit: int) -> float | None:
        return sum(rank <= limit for rank in ranks) / len(ranks) if ranks else None

    return {
        "prompts": len(results),
        "greedy_equal_prompts": sum(result.first_divergence is None for result in results),
        "positions": len(ranks),
        "top1_share": share(1),
        "top10_share": share(10),
        "top100_share": share(100),
        "mean_rank": sum(ranks) / len(ranks) if ranks else None,
        "max_rank": max(ranks, default=None),
        "largest_margin": max((m for result in results for m in result.margins), default=None),
        "mean_logprob_error": sum(errors) / len(errors) if errors else None,
        "largest_logprob_error": max(errors, default=None),
        "largest_decode_logprob_error": max(decode, default=None),
        "largest_layer_error": max((e.output_largest for e in layers.layers), default=None),
        "rerouted_rows": sum(e.rerouted for e in layers.layers),
        "layer_rows": sum(e.rows + e.rerouted for e in layers.layers),
    }


def judge(report: Report) -> tuple[Literal["pass", "fail"], list[str]]:
    """The verdict that the rest of the report calls for, and the reasons."""
    reasons = list(_failures(report))
    if reasons:
        return "fail", reasons
    found = figures_of(report.results, report.layers)
    layers = f"; {len(report.layers.layers)} MoE layers agree" if report.layers.available else ""
    equal, prompts = found["greedy_equal_prompts"], found["prompts"]
    rest = "" if equal == prompts else ", the others part at near-ties"
    return "pass", [
        f"{equal} of {prompts} prompts have equal greedy tokens{rest}; "
        f"{found['top1_share']:.2%} of {found['positions']} positions "
        f"have the reference's token on top; largest logprob error "
        f"{found['largest_logprob_error']:.2g} nats{layers}"
    ]


def _failures(report: Report) -> Iterator[str]:
    own, other = report.candidate.checkpoint, report.reference.checkpoint
    unseen = report.reference.kind == "url" and not other
    if not unseen and own != other:
        names = sorted(name for name in {*own, *other} if own.get(name) != other.get(name))
        yield (
            f"the two sides have different checkpoints ({', '.join(names)}), so their answers say "
            f"nothing of each other"
        )
    for problem in report.problems:
        place = "" if problem.prompt is None else f", prompt {problem.prompt}"
        yield f"{problem.side}{place}: {problem.what}"
    complete = {result.prompt for result in report.results if result.tokens and result.ranks}
    missing = sorted(set(range(len(report.asked.lengths))) - complete)
    if missing:
        yield f"prompts that were not compared: {', '.join(map(str, missing))}"
    for result in report.results:
        short = {len(result.ranks), len(result.margins), len(result.errors)} != {result.tokens}
        if short or result.tokens != report.asked.new_tokens:
            yield f"prompt {result.prompt}: not every token was compared"
    if report.results:
        yield from report.thresholds.exceeded(figures_of(report.results, report.layers))
        yield from _divergences(report)
    if report.layers.available and not report.layers.layers:
        yield "no MoE layer was compared, although the reference can record them"
    if report.layers.last_layer is not None:
        yield report.layers.note
    elif any(report.thresholds.layer_is_wrong(e.output_largest, e.output_p90)
             for e in report.layers.layers):  # fmt: skip
        yield "a MoE layer's output is wrong"


def _divergences(report: Report) -> Iterator[str]:
    tie = report.thresholds.near_tie
    for result in report.results:
        at, gap = result.first_divergence, result.divergence_gap
        if at is None or (gap is not None and gap <= tie):
            continue
        lead = "an unknown lead" if gap is None else f"a lead of {gap:.3g} nats"
        yield (
            f"prompt {result.prompt}: the greedy tokens part at token {at}, where the reference's "
            f"token has {lead} (a near-tie has at most {tie:g})"
        )


def write(report: Report, path: Path) -> None:
    """Write `report` as JSON.

    Raises:
        OSError: it cannot be written; no half report is left.
    """
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    write_whole(path, text + b"\n")


def read(path: Path) -> Report:
    """Read a report.

    Raises:
        BadReport: it cannot be read, or is none of this version.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise BadReport(f"{path} cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise BadReport(f"{path} is no report of a validation: {error}") from error
    if report.version != VERSION:
        raise BadReport(f"{path} is a report of version {report.version}, not {VERSION}")
    return report


def shortcomings(report: Report) -> list[str]:
    """Why `report` shows nothing to be right; empty: it is sound, and passes."""
    wrong = [f"it contradicts itself: {sentence}" for sentence in check(report)]
    if report.verdict != PASS:
        wrong.append(f"the validation failed: {'; '.join(report.reasons)}")
    return wrong


def check(report: Report) -> list[str]:
    """What in `report` contradicts the rest of it; nothing where it is sound."""
    wrong = []
    if report.figures != figures_of(report.results, report.layers):
        wrong.append("its figures are not those of its results")
    verdict, _ = judge(report)
    if verdict != report.verdict:
        wrong.append(f"its verdict is {report.verdict}, but what it holds calls for {verdict}")
    return wrong
