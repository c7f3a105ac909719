"""Two records side by side: what differs between them, in what was run and in what came out."""

from __future__ import annotations

from typing import Any

from benchmarks.payloads import markdown
from benchmarks.record import Record
from benchmarks.steps import SPREAD


def differences(first: Record, second: Record) -> list[str]:
    """What was run otherwise, a line a fact."""
    found = []
    for name in ("name", "rounds", "seed"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            found.append(f"{name}: {one} and {other}")
    facts = (_flat(first.configuration), _flat(second.configuration))
    found += _differing("configuration", *facts)
    for part in ("gpus", "packages", "sources"):
        pair = (_flat(r.environment.get(part)) for r in (first, second))
        found += _differing(part, *pair)
    return found


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = {str(index): part for index, part in enumerate(value)}.items()
    else:
        return {place: value}
    return {
        key: inner
        for name, part in parts
        for key, inner in _flat(part, f"{place}.{name}" if place else str(name)).items()
    }


def _differing(what: str, one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        f"{what}.{key}: {one.get(key)} and {other.get(key)}"
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key)
    ]


def compare(first: Record, second: Record) -> list[str]:
    """Lines for people: differences, figures, and what may be said of them."""
    lines = [f"A: {first.name} of {first.created}", f"B: {second.name} of {second.created}", ""]
    differing = differences(first, second)
    lines += ["Run otherwise:", *(f"  {line}" for line in differing), ""] if differing else []
    rows = []
    for name in dict.fromkeys([*first.figures, *second.figures]):
        one, other = first.figures.get(name), second.figures.get(name)
        if one is None or other is None:
            rows.append([name, *("-" if f is None else "there" for f in (one, other)), "-", "-"])
            continue
        for title, key in (("step, ms", "step_ms"), ("tokens/s/GPU", "tokens_per_s_per_gpu")):
            a, b = getattr(one, key), getattr(other, key)
            if a is None or b is None:
                continue
            change = b / a - 1
            judged = "equal within 3 %" if abs(change) <= SPREAD else "differs"
            rows.append([f"{name}, {title}", f"{a:.4g}", f"{b:.4g}", f"{change:+.1%}", judged])
    lines += markdown(["system", "A", "B", "B - A", ""], rows)
    for letter, record in (("A", first), ("B", second)):
        if not record.verdict.counts:
            lines += ["", f"{letter} does not count: {'; '.join(record.verdict.reasons)}"]
    lines += ["", "From two runs: a change, and no speed-up; ratios count within one run alone."]
    return lines
