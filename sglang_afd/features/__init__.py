"""Which SGLang features AFD serves: lookups in the table, and the document made from it.

A row is *served*, with the test that shows it, or *refused*: the gate refuses its flags and
environment variables before anything starts, and `sglang_afd.upstream.refusals` its requests.
`sglang_afd.features.reviewed` lists all other flags of SGLang; the gate refuses what is nowhere.
``python -m sglang_afd.features`` writes docs/features.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_afd.command_line import is_on, means, values
from sglang_afd.features import refused_execution, refused_model
from sglang_afd.features.reviewed import PASSED, SETTINGS
from sglang_afd.features.row import Feature, Switch
from sglang_afd.features.row import refused as refused_row
from sglang_afd.features.served import SERVED
from sglang_afd.flags import OWNED

__all__ = [
    "FEATURES",
    "KNOWN",
    "UNKNOWN",
    "Asked",
    "Feature",
    "Switch",
    "asked_of",
    "document",
    "refused",
    "refused_request",
]

FEATURES: tuple[Feature, ...] = (
    *SERVED,
    *refused_execution.REFUSED,
    *refused_model.REFUSED,
)
UNKNOWN = refused_row(
    "an unknown feature",
    "the SGLang that AFD extends has no such flag, so what it does to the split is not known",
    "correct it, or leave it out",
)
KNOWN: frozenset[str] = frozenset(
    (
        *(name for f in FEATURES for s in f.switches for name in (s.flag, *s.aliases)),
        *(name for spellings, _ in OWNED for name in spellings),
        *(name for names in (*PASSED.values(), *SETTINGS.values()) for name in names),
    )
)
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "features.md"


class Asked(NamedTuple):
    """A refused feature that a command asks for, and with what (a flag with its value, or a
    variable)."""

    feature: Feature
    by: str


def refused(args: Sequence[str], environment: Mapping[str, str]) -> Iterator[Asked]:
    """The refused features that SGLang's arguments `args` or the environment turn on.

    A setting of a refused feature asks for it, and a flag that is in no list for `UNKNOWN`.
    """
    args, ambiguous = _without_ambiguous(args)
    yield from ambiguous
    yield from asked_of(args, served=False)
    for feature in FEATURES:
        if feature.served:
            continue
        for flag in SETTINGS.get(feature.name, ()):
            if values(args, flag):
                yield Asked(feature, flag)
        for name in feature.environment:
            if is_on(environment.get(name)):
                yield Asked(feature, f"{name}={environment[name]}")
    for flag in _unknown(args):
        yield Asked(UNKNOWN, flag)


def asked_of(args: Sequence[str], *, served: bool) -> Iterator[Asked]:
    """The features, all served or all refused, that SGLang's arguments `args` turn on by a flag."""
    for feature in FEATURES:
        if feature.served is not served:
            continue
        for switch in feature.switches:
            for value in values(args, switch.flag, *switch.aliases):
                if switch.turned_on_by(value):
                    yield Asked(feature, " ".join(filter(None, (switch.flag, value))))


def _without_ambiguous(args: Sequence[str]) -> tuple[list[str], list[Asked]]:
    """`args` with a placeholder for each abbreviation of several flags, and their refusals."""
    kept: list[str] = []
    found: list[Asked] = []
    for arg in args:
        name = arg.partition("=")[0]
        meant = sorted(flag for flag in KNOWN if arg.startswith("--") and means(name, flag))
        if len(meant) > 1 and name not in KNOWN:
            reason = f"it is short for {', '.join(meant)}"
            mend = "write the flag that is meant in full"
            found.append(Asked(refused_row("an ambiguous feature", reason, mend), name))
            kept.append("--")
        else:
            kept.append(arg)
    return kept, found


def _unknown(args: Sequence[str]) -> Iterator[str]:
    """The flags in `args` that no row, no list and no --afd-* flag stands for."""
    names = (arg.partition("=")[0] for arg in args if arg.startswith("--") and arg != "--")
    for name in names:
        spelt = name.replace("--no-", "--", 1)  # the other form of a switch
        if not any(means(spelt, flag) for flag in KNOWN):
            yield name


def refused_request(request: str) -> Feature:
    """The refused feature that an endpoint or a request field belongs to.

    Raises:
        KeyError: no refused row names it.
    """
    for feature in FEATURES:
        if not feature.served and request in feature.requests:
            return feature
    raise KeyError(request)


def document() -> str:
    """The text of docs/features.md."""
    served = [
        f"| {f.name} | {_turned_on(f)} | {f.reason or '-'} | `{f.test.rpartition('/')[2]}` |"
        for f in FEATURES
        if f.served
    ]
    refusals = [
        f"| {f.name} | {_turned_on(f)} | {f.reason} | {f.mend} |" for f in FEATURES if not f.served
    ]
    return "\n".join(
        [
            "<!-- Generated by `python -m sglang_afd.features`; do not edit. -->",
            "# SGLang features under AFD",
            "",
            "What a flag, request or environment variable in the second column asks for is either "
            "served or refused. Refused flags and variables end the start with one error; refused "
            "requests get a 400. A setting of a refused feature is refused with it. Other flags "
            "were looked at one by one and pass through to SGLang, most without a test of their "
            "own. A flag that is nowhere below is refused.",
            "",
            f"## Served ({len(served)})",
            "",
            "The last column names the test under `tests/integration` that shows it.",
            "",
            "| feature | turned on by | limits | shown by |",
            "|---|---|---|---|",
            *served,
            "",
            f"## Refused ({len(refusals)})",
            "",
            "| feature | turned on by | why not | instead |",
            "|---|---|---|---|",
            *refusals,
            "",
            "## Refused settings",
            "",
            "| feature | its settings |",
            "|---|---|",
            *(f"| {name} | {_code(names)} |" for name, names in SETTINGS.items()),
            "",
            "## Passed through",
            "",
            "| why | flags |",
            "|---|---|",
            *(f"| {why} | {_code(names)} |" for why, names in PASSED.items()),
            "",
        ]
    )


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _turned_on(feature: Feature) -> str:
    parts = []
    for switch in feature.switches:
        text = f"`{switch.flag}`"
        if switch.only:
            text += f" {', '.join(switch.only)}"
        elif switch.off:
            text += f" other than {', '.join(switch.off)}"
        parts.append(text)
    parts += [f"`{name}`" for name in (*feature.requests, *feature.environment)]
    return "; ".join(parts) or ("default" if feature.served else "see below")
