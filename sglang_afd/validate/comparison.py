"""Compares two sides prompt by prompt: greedy tokens, and ranks under teacher forcing."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_afd.validate.answers import (
    Answering,
    Continuation,
    Forced,
    Unanswered,
    answered,
    ask_all,
    continue_greedily,
    forced,
)
from sglang_afd.validation.report import Problem, PromptResult


def compare(
    server: Answering, reference: Sequence[Continuation], *, tokens: int
) -> list[PromptResult]:
    """Ask `server` everything and compare it with `reference`.

    Raises:
        Unanswered: for the first request that was refused, truncated or not finite.
    """
    own = continue_greedily(server, [entry.prompt for entry in reference], tokens=tokens)
    seen = answered(ask_all(lambda entry: forced(server, entry), reference))
    return [one_prompt(i, *sides) for i, sides in enumerate(zip(reference, own, seen, strict=True))]


def one_prompt(
    number: int, reference: Continuation, own: Continuation, seen: Forced
) -> PromptResult:
    """One prompt, of which everything was answered."""
    pairs = list(zip(reference.tokens, own.tokens, strict=True))
    at = next((i for i, (other, mine) in enumerate(pairs) if other != mine), None)
    alike = len(pairs) if at is None else at
    gap = reference.gaps[at] if at is not None and reference.gaps else None
    return PromptResult(
        prompt=number,
        length=len(reference.prompt),
        tokens=len(reference.tokens),
        first_divergence=at,
        divergence_gap=gap,
        decode_errors=_errors(own.logprobs[:alike], reference.logprobs[:alike]),
        ranks=seen.ranks,
        margins=seen.margins,
        errors=_errors(seen.logprobs, reference.logprobs),
    )


def all_prompts(
    reference: Sequence[Continuation | Unanswered],
    own: Sequence[Continuation | Unanswered],
    seen: Sequence[Forced | Unanswered],
) -> tuple[list[PromptResult], list[Problem]]:
    """Every prompt: its result, or the problems that stand in its place."""
    results: list[PromptResult] = []
    problems: list[Problem] = []
    for number, (other, mine, ranks) in enumerate(zip(reference, own, seen, strict=True)):
        if isinstance(other, Unanswered):
            problems.append(Problem(side="reference", prompt=number, what=str(other)))
            continue
        wrong = [answer for answer in (mine, ranks) if isinstance(answer, Unanswered)]
        problems += [Problem(side="candidate", prompt=number, what=str(w)) for w in wrong]
        if not isinstance(mine, Unanswered) and not isinstance(ranks, Unanswered):
            results.append(one_prompt(number, other, mine, ranks))
    return results, problems


def _errors(own: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(mine - theirs) for mine, theirs in zip(own, other, strict=True)]
