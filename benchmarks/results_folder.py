"""What lies in folders of results: records, and what scripts wrote before there were records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.configuration import Configuration, Script
from benchmarks.payloads import script_of
from benchmarks.record import Record


class Bare(NamedTuple):
    """A script's file."""

    file: Path
    script: str
    content: dict[str, Any]


class Found(NamedTuple):
    """Files by what they are; others are not looked at."""

    records: list[tuple[Path, Record]]
    bare: list[Bare]


def look(folders: Iterable[Path]) -> Found:
    """All records and scripts' files below `folders`, by path.

    Raises:
        BadRecord: a record cannot be read, or contradicts itself.
    """
    records, bare = [], []
    for folder in folders:
        if not folder.is_dir():
            raise record.BadRecord(f"there is no folder {folder}")
        for file in sorted(folder.rglob("*.json")):
            content = json.loads(file.read_bytes())
            if isinstance(content, dict) and {"version", "verdict", "turns"} <= set(content):
                records.append((file, record.load(file)))
            elif script := script_of(content):
                bare.append(Bare(file, script, content))
    return Found(records, bare)


def state_of(name: str, configuration: Configuration, found: Found) -> str:
    """Whether a configuration has been run, in words."""
    own = [entry for _, entry in found.records if entry.name == name]
    if own:
        latest = max(own, key=lambda entry: entry.created)
        counts = "counts" if latest.verdict.counts else "does not count"
        return f"run {latest.created[:10]}, {counts}"
    if any(_wrote(configuration, entry) for entry in found.bare):
        return "run by the script alone"
    return "not run"


def regime_of(bare: Bare, configurations: Iterable[Configuration]) -> str:
    """The regime of a script's file: that of the configuration which runs the script so."""
    return next((entry.regime for entry in configurations if _wrote(entry, bare)), "")


def _wrote(configuration: Configuration, bare: Bare) -> bool:
    """Whether `bare` is what running `configuration` would have written."""
    if not isinstance(configuration, Script) or configuration.script != bare.script:
        return False
    return ("--one-gpu" in configuration.args) == bare.content.get("one_gpu", False)
