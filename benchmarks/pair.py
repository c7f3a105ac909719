"""Two running endpoints, asked the same in turns: which is better, if they may be compared at all.

The outcome is one of three, with its reasons:

* reject: they must not be ranked (identities differ, no passing validation, requests failed), or
  the candidate is slower by more than 3 %;
* keep: the candidate is faster by more than 3 % in every round, and nothing else got worse by 3 %;
* tune: all between.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks import pair_identity
from benchmarks.pair_identity import Endpoint, Side
from benchmarks.pair_requests import Round, Workload, figures_of, rates_of, send
from benchmarks.progress import say
from benchmarks.steps import SPREAD
from sglang_afd.validate import environment
from sglang_afd.whole_file import write_whole

VERSION = 1
_LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")


class Outcome(msgspec.Struct, kw_only=True):
    """What to do with the candidate."""

    action: Literal["keep", "tune", "reject"]
    ranked: bool
    """False: the figures must not be compared."""
    reasons: list[str]


class Pair(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All that was asked and came back."""

    version: int
    label: str
    created: str
    environment: dict[str, Any]
    """Of the client."""
    workload: dict[str, Any]
    gpus: int
    validation: str | None
    """The report's verdict in words; None: none was given."""
    identities: dict[str, Any]
    rounds: dict[str, list[Round]]
    figures: dict[str, dict[str, Any]]
    outcome: Outcome


class Taken(ValueError):
    """The label has a record already."""


def file_of(label: str, folder: Path) -> Path:
    """Where the record of `label` goes.

    Raises:
        Taken: there is one, or the label is no file's name.
    """
    if not label or Path(label).name != label or label.startswith("."):
        raise Taken(f"--label {label!r} is no name; give letters, digits, - and _")
    file = folder / f"pair-{label}.json"
    if file.exists():
        raise Taken(f"{file} is there already, and is never written over; give another --label")
    return file


def run(
    label: str,
    baseline: Endpoint,
    candidate: Endpoint,
    workload: Workload,
    *,
    gpus: int,
    validation: Path | None,
    rounds: int,
    timeout: float,
    about: dict[str, Any],
) -> Pair:
    """Ask both endpoints `rounds` times, in turns, unless they must not be ranked.

    Args:
        gpus: of each side.
        validation: the candidate's report.
        timeout: seconds without a token after which a request fails.
        about: the workload's name and seed.
    """
    sides = {"baseline": pair_identity.ask(baseline), "candidate": pair_identity.ask(candidate)}
    reasons = pair_identity.not_comparable(sides["baseline"], sides["candidate"], gpus)
    reasons += pair_identity.not_validated(validation, sides["candidate"])
    found: dict[str, list[Round]] = {"baseline": [], "candidate": []}
    for number in range(rounds if not reasons else 0):
        for name, endpoint in (("baseline", baseline), ("candidate", candidate)):
            say(f"round {number + 1} of {rounds}: {len(workload.prompts)} requests to the {name}")
            found[name].append(send(endpoint, workload, timeout=timeout))
    figures = {name: figures_of(own) for name, own in found.items()}
    return Pair(
        version=VERSION,
        label=label,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment=environment.describe(),
        workload={
            **about,
            "requests": len(workload.prompts),
            "lengths": sorted({len(prompt) for prompt in workload.prompts}),
            "new_tokens": workload.new_tokens,
            "concurrency": workload.concurrency,
        },
        gpus=gpus,
        validation=None if validation is None else validation.name,
        identities={name: _for_record(side) for name, side in sides.items()},
        rounds=found,
        figures=figures,
        outcome=conclude(reasons, found, figures),
    )


def _for_record(side: Side) -> dict[str, Any]:
    return {**side.identity, "layout": side.layout}


def conclude(
    reasons: Sequence[str], rounds: dict[str, list[Round]], figures: dict[str, dict[str, Any]]
) -> Outcome:
    """The outcome that the measurements call for.

    Args:
        reasons: why the two must not be ranked.
    """
    problems = list(reasons)
    for name, own in figures.items():
        if own["failed"]:
            first = next(s.failed for r in rounds[name] for s in r.samples if s.failed)
            problems.append(f"{own['failed']} requests to the {name} failed: {first}")
    if problems:
        return Outcome(action="reject", ranked=False, reasons=problems)
    pairs = zip(rates_of(rounds["baseline"]), rates_of(rounds["candidate"]), strict=True)
    ratios = [other / one for one, other in pairs]
    middle = statistics.median(ratios)
    said = f"throughput {middle - 1:+.1%} (rounds: {', '.join(f'{r - 1:+.1%}' for r in ratios)})"
    if middle < 1 - SPREAD:
        return Outcome(action="reject", ranked=True, reasons=[said])
    worse = [
        f"{name} {figures['candidate'][name] / figures['baseline'][name] - 1:+.1%}"
        for name in _LATENCIES
        if figures["baseline"][name]
        and figures["candidate"][name] > figures["baseline"][name] * (1 + SPREAD)
    ]
    if min(ratios) > 1 + SPREAD and len(ratios) > 1 and not worse:
        return Outcome(action="keep", ranked=True, reasons=[said])
    why = [said, *worse]
    if middle <= 1 + SPREAD:
        why.append("throughput is equal within 3 %")
    elif min(ratios) <= 1 + SPREAD:
        why.append("not every round shows the gain")
    if len(ratios) < 2:
        why.append("one round alone is not enough to keep it")
    return Outcome(action="tune", ranked=True, reasons=why)


def save(pair: Pair, file: Path) -> None:
    """Write the record.

    Raises:
        FileExistsError: another one has come there meanwhile.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, msgspec.json.format(msgspec.json.encode(pair), indent=1) + b"\n", new=True)
