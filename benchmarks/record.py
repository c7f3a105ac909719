"""A record: what was run, on what, every raw step, and a verdict that is a function of the rest.

Records are written once and never over another.  Paths of this machine appear in `environment`
alone, as `sglang_afd.validate.environment` gives them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.steps import SPREAD, spread
from sglang_afd.whole_file import write_whole

VERSION = 1
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PASS, FAIL, NONE = "pass", "fail", "none"


class BadRecord(ValueError):
    """A file that is no record; the message says why."""


class _Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a record; an unknown or missing field makes it unreadable."""


class Turn(_Part, kw_only=True):
    """One system's turn, or a script's run."""

    system: str
    """Empty for a script, which is its own system."""
    round: int
    began: str
    seconds: float
    result: dict[str, Any]
    """What `benchmarks.decode`, `serving` or a script measured, raw steps included."""
    failed: str = ""
    """Why there is no result."""


class Figures(_Part, kw_only=True):
    """What one system came to, over its turns; None: nothing counts, or it is not measured."""

    gpus: int
    step_ms: float | None = None
    tokens_per_s_per_gpu: float | None = None
    spread: float | None = None
    """Between turns."""
    against_baseline: float | None = None
    """Tokens per second and GPU over the baseline's: the median of the rounds' ratios."""


class Verdict(_Part, kw_only=True):
    """Whether the record counts, and whether it repeats its reference."""

    counts: bool
    reasons: list[str]
    """Why not; empty: it counts."""
    reference: Literal["pass", "fail", "none"]
    """none: there is no reference, or the record does not count."""


class Record(_Part, kw_only=True):
    """All of it."""

    version: int
    name: str
    """The configuration's."""
    kind: str
    regime: str
    created: str
    command: list[str]
    environment: dict[str, Any]
    """Packages, commit and hash of the changes, GPUs with their UUIDs."""
    configuration: dict[str, Any]
    seed: int
    rounds: int
    """How many were asked for."""
    baseline: str
    """Empty for a script."""
    emulated: list[str]
    """Systems with ranks that are stood in for: their answers are not the model's."""
    turns: list[Turn]
    reference: dict[str, float] = {}
    """Step times in ms, by system, that this record must repeat; empty: no reference."""
    figures: dict[str, Figures] = {}
    verdict: Verdict


def rate_of(turn: Turn) -> float | None:
    """Tokens per second and GPU of one turn, if it was measured."""
    result = turn.result
    if turn.failed or not result.get("gpus"):
        return None
    if result.get("ms"):
        return result["requests"] / result["ms"] * 1000 / result["gpus"]
    if result.get("output_throughput"):
        return result["output_throughput"] / result["gpus"]
    return None


def figures_of(turns: Iterable[Turn], baseline: str) -> dict[str, Figures]:
    """What the systems came to."""
    by_system: dict[str, list[Turn]] = defaultdict(list)
    rates: dict[tuple[str, int], float] = {}
    for turn in turns:
        by_system[turn.system].append(turn)
        rate = rate_of(turn)
        if rate is not None:
            rates[turn.system, turn.round] = rate
    found: dict[str, Figures] = {}
    for system, own in by_system.items():
        measured = [rate for (name, _), rate in rates.items() if name == system]
        if not measured:
            continue
        steps = [turn.result["ms"] for turn in own if turn.result.get("ms")]
        ratios = [
            rate / rates[baseline, number]
            for (name, number), rate in rates.items()
            if name == system and (baseline, number) in rates
        ]
        found[system] = Figures(
            gpus=next(turn.result["gpus"] for turn in own if rate_of(turn) is not None),
            step_ms=statistics.median(steps) if steps else None,
            tokens_per_s_per_gpu=statistics.median(measured),
            spread=spread(measured),
            against_baseline=statistics.median(ratios) if ratios else None,
        )
    return found


def judge(record: Record) -> Verdict:
    """The verdict that the rest of the record calls for."""
    reasons = []
    for turn in record.turns:
        place = f"{turn.system or record.name}, round {turn.round}"
        if turn.failed:
            reasons.append(f"{place}: {turn.failed.splitlines()[0]}")
        reasons += [f"{place}: {problem}" for problem in turn.result.get("problems", [])]
        reasons += [f"{place}: {failure}" for failure in _failures_in(turn.result)]
        reasons += [f"{place}: {problem}" for problem in _unmarked(turn, record.emulated)]
    systems = record.configuration.get("systems", {"": None})
    for number in range(1, record.rounds + 1):
        there = {turn.system for turn in record.turns if turn.round == number}
        missing = sorted(set(systems) - there)
        if missing:
            reasons.append(f"round {number}: not run: {', '.join(missing) or record.name}")
    if len(systems) > 1 and record.rounds < 2:
        reasons.append("one round: systems must take turns at least twice (A B A B)")
    if record.kind in ("decode", "variants"):
        for system, figures in figures_of(record.turns, record.baseline).items():
            if figures.spread is not None and figures.spread > SPREAD:
                reasons.append(f"{system}: its turns differ by {figures.spread:.1%}")
    return Verdict(counts=not reasons, reasons=reasons, reference=_against(record, not reasons))


def _unmarked(turn: Turn, emulated: list[str]) -> list[str]:
    """What the server says of emulated ranks where the record says otherwise."""
    afd = (turn.result.get("holdings") or {}).get("afd")
    if afd is None or bool(afd.get("emulated")) is (turn.system in emulated):
        return []
    says = "emulates ranks" if afd.get("emulated") else "emulates no ranks"
    return [f"the server {says}, its system says otherwise"]


def _failures_in(result: Any, place: str = "") -> list[str]:
    """What parts of a script's result say of their failure."""
    if isinstance(result, list):
        return [found for part in result for found in _failures_in(part, place)]
    if not isinstance(result, dict):
        return []
    own = [f"{place or 'it'} failed: {result['failed']}"] if result.get("failed") else []
    return own + [
        found
        for key, part in result.items()
        for found in _failures_in(part, f"{place}.{key}" if place else str(key))
    ]


def _against(record: Record, counts: bool) -> Literal["pass", "fail", "none"]:
    if not record.reference or not counts:
        return "none"
    found = figures_of(record.turns, record.baseline)
    for system, wanted in record.reference.items():
        step = found[system].step_ms if system in found else None
        if step is None or abs(step / wanted - 1) > SPREAD:
            return "fail"
    return "pass"


def concluded(record: Record) -> Record:
    """`record` with the figures and the verdict that its turns call for."""
    figures = figures_of(record.turns, record.baseline)
    return msgspec.structs.replace(record, figures=figures, verdict=judge(record))


def reference_steps(record: Record) -> dict[str, float]:
    """The step times that another record of the configuration must repeat.

    Raises:
        BadRecord: it does not count, or has no steps.
    """
    steps = {name: f.step_ms for name, f in record.figures.items() if f.step_ms is not None}
    if not record.verdict.counts or not steps:
        raise BadRecord("a reference must count and have step times")
    return steps


def encode(record: Record) -> bytes:
    """As JSON, a line a field."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def save(record: Record, folder: Path) -> Path:
    """Write the record into `folder` under a name that is free; the file."""
    folder.mkdir(parents=True, exist_ok=True)
    content, number = encode(record), 1
    while True:
        file = folder / f"{record.name}{'' if number == 1 else f'-{number}'}.json"
        try:
            write_whole(file, content, new=True)
            return file
        except FileExistsError:
            number += 1


def load(file: Path) -> Record:
    """Read a record.

    Raises:
        BadRecord: it cannot be read, is no record of this version, or contradicts itself.
    """
    try:
        record = msgspec.json.decode(file.read_bytes(), type=Record)
    except OSError as error:
        raise BadRecord(f"{file} cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise BadRecord(f"{file} is no record: {error}") from error
    if record.version != VERSION:
        raise BadRecord(f"{file} is a record of version {record.version}, not {VERSION}")
    again = concluded(record)
    if (again.figures, again.verdict) != (record.figures, record.verdict):
        raise BadRecord(f"{file} contradicts itself: its turns call for another verdict")
    return record


def without_paths(value: Any, *, work: Path | None = None) -> Any:
    """`value` with this machine's folders named, in every string of it."""
    places = {} if work is None else {str(work): "WORK"}
    for name, folder in (
        *(("CHECKOUT", str(ROOT)), ("PYTHON", sys.prefix), ("PYTHON", sys.base_prefix)),
        *(("PACKAGES", place) for place in sys.path if place.endswith("site-packages")),
        *(("TMP", tempfile.gettempdir()), ("HERE", os.getcwd()), ("HOME", str(Path.home()))),
    ):
        places.setdefault(folder, name)
    ordered = sorted((place for place in places if len(place) > 3), key=len, reverse=True)

    def clean(part: Any) -> Any:
        if isinstance(part, str):
            for place in ordered:
                part = part.replace(place, places[place])
            return part
        if isinstance(part, dict):
            return {clean(key): clean(inner) for key, inner in part.items()}
        return [clean(inner) for inner in part] if isinstance(part, list | tuple) else part

    return clean(value)
