"""One validation from its settings to its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from sglang_afd.identity import checkpoint_content, checkpoint_identity
from sglang_afd.progress import Waiting
from sglang_afd.validate import candidate, layers, references
from sglang_afd.validate.answers import Continuation, Unanswered
from sglang_afd.validate.candidate import CandidateAnswers
from sglang_afd.validate.comparison import all_prompts
from sglang_afd.validate.settings import Settings
from sglang_afd.validate.sides import SideAnswers, SideFailed, redacted
from sglang_afd.validation.report import (
    CHECKPOINT,
    NO_LAYERS,
    VERSION,
    Asked,
    Identity,
    Layers,
    Problem,
    PromptResult,
    Report,
    figures_of,
    judge,
)


def run(settings: Settings, command: Sequence[str], waiting: Waiting) -> Report:
    """Ask both sides, one after the other, and compare them; a side that fails is in the report."""
    began = time.monotonic()
    waiting.begin(f"Reading {settings.model} for its content's hash")
    content = checkpoint_content(settings.model)
    other: dict[str, str] = {}  # a server's, asked by URL, is not known yet
    if not settings.by_url:
        same = settings.reference_model.resolve() == settings.model.resolve()
        other = content if same else checkpoint_content(settings.reference_model)
    own_command = {"command": redacted(settings.candidate_args)}
    own = Identity(kind="afd", configuration=own_command, checkpoint=content, software={})
    reference_is = Identity(
        kind="url" if settings.by_url else settings.reference,
        configuration={"reference": settings.reference},
        checkpoint=other,
        software={},
    )
    results: list[PromptResult] = []
    problems: list[Problem] = []
    compared = NO_LAYERS
    if (
        settings.by_url or content == other
    ):  # else the answers say nothing, and nobody need wait for them
        try:
            reference = references.answer(settings, waiting)
            reference_is = reference.identity
            reference_is.checkpoint = reference_is.checkpoint or other
            found = candidate.answer(
                settings, reference.results, waiting, record=not reference.no_layers
            )
            own = found.identity
            own.checkpoint = content
            own.configuration[CHECKPOINT] = checkpoint_identity(str(settings.model))
            waiting.begin("Comparing")
            results, problems = all_prompts(reference.results, found.greedy, found.forced)
            compared, more = _layers(settings, reference, found)
            problems += more
        except SideFailed as error:
            problems.append(Problem(side=error.side, prompt=None, what=str(error)))
    prompts = settings.prompts
    report = Report(
        version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=redacted(command),
        seconds=0.0,
        layout=settings.layout,
        candidate=own,
        reference=reference_is,
        asked=Asked(
            name=prompts.name,
            seed=settings.seed,
            sha256=prompts.sha256,
            lengths=[len(prompt) for prompt in prompts.prompts],
            new_tokens=settings.new_tokens,
            of_text=prompts.of_text,
        ),
        thresholds=settings.thresholds,
        problems=problems,
        results=results,
        layers=compared,
        figures=figures_of(results, compared),
        verdict="fail",
        reasons=[],
    )
    report.verdict, report.reasons = judge(report)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def _layers(
    settings: Settings, reference: SideAnswers, found: CandidateAnswers
) -> tuple[Layers, list[Problem]]:
    if reference.no_layers:
        return Layers(available=False, note=reference.no_layers, layers=[]), []
    lengths: dict[int, int] = {}
    for number in settings.record:
        both = reference.results[number], found.greedy[number]
        if not any(isinstance(side, Unanswered) for side in both):
            alike = _made_alike(*both)  # type: ignore[arg-type]
            lengths[number] = settings.recorded_rows(len(settings.prompts.prompts[number]), alike)
    if not lengths:
        note = "no recorded prompt was answered by both sides"
        return Layers(available=False, note=note, layers=[]), []
    folders = settings.recordings("candidate"), settings.recordings("reference")
    try:
        found_layers = layers.compare(*folders, lengths, settings.thresholds)
    except layers.Incomplete as error:
        problem = Problem(side="candidate", prompt=None, what=f"MoE layers: {error}")
        return Layers(available=False, note=str(error), layers=[]), [problem]
    if settings.replayed:
        found_layers.note += "; of prompts alone, for replayed graphs record nothing"
    return found_layers, []


def _made_alike(reference: Continuation, own: Continuation) -> int:
    """Tokens behind the prompt that both sides have read in common."""
    pairs = zip(reference.tokens, own.tokens, strict=True)
    alike = next((i for i, (other, mine) in enumerate(pairs) if other != mine), None)
    # The last token of a continuation is made, never read.
    return len(own.tokens) - 1 if alike is None else alike
