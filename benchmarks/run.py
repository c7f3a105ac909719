"""Run a configuration: its systems take turns on this machine, A B A B, and a record is written."""

from __future__ import annotations

import datetime
import http.client
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import decode, record, scripts, serving
from benchmarks.configuration import Configuration, Script, Serving, Steps, kind_of
from benchmarks.models import NoModel
from benchmarks.progress import say
from benchmarks.record import Record, Turn, Verdict
from sglang_afd.running import ServerFailed
from sglang_afd.validate import environment

_FAILURES = (
    *(ServerFailed, decode.NotAnswered, serving.BenchFailed, scripts.ScriptFailed, NoModel),
    *(OSError, http.client.HTTPException, ValueError, LookupError),
)


def run(
    name: str,
    configuration: Configuration,
    *,
    work: Path,
    command: Sequence[str],
    rounds: int | None = None,
    reference: Record | None = None,
    draft: Path | None = None,
) -> Record:
    """Run `configuration`.

    Args:
        work: an empty folder for logs and models.
        command: the command line, for the record.
        rounds: how often the systems take turns (None: as the configuration says).
        reference: a record whose step times must be repeated.
        draft: where what there is goes after every turn.

    Raises:
        BadRecord: the reference cannot be one.
    """
    systems = configuration.compared()
    made = Record(
        version=record.VERSION,
        name=name,
        kind=kind_of(configuration),
        regime=configuration.regime,
        created=_now(),
        command=record.without_paths(list(command), work=work),
        environment=environment.describe(),
        configuration=record.without_paths(msgspec.to_builtins(configuration), work=work),
        seed=configuration.seed,
        rounds=configuration.rounds if rounds is None else rounds,
        baseline="" if isinstance(configuration, Script) else configuration.baseline,
        emulated=[name for name, system in systems.items() if system.emulated],
        turns=[],
        reference=record.reference_steps(reference) if reference else {},
        verdict=Verdict(counts=False, reasons=["not run"], reference="none"),
    )
    for number in range(1, made.rounds + 1):
        for system in systems or [""]:
            say(f"{name}: round {number} of {made.rounds}" + (f", {system}" if system else ""))
            made.turns.append(_turn(system, number, configuration, work))
            if draft is not None:
                draft.write_bytes(record.encode(record.concluded(made)))
    return record.concluded(made)


def _turn(system: str, number: int, configuration: Configuration, work: Path) -> Turn:
    """Logs of every turn are kept apart."""
    folder = work / f"{number}-{system or 'script'}"
    folder.mkdir(parents=True)
    began, created = time.monotonic(), _now()
    result: dict[str, Any] = {}
    failed = ""
    try:
        if isinstance(configuration, Steps):
            measure = partial(decode.measure, system, configuration)
        elif isinstance(configuration, Serving):
            measure = partial(serving.measure, system, configuration)
        else:
            measure = partial(scripts.measure, configuration)
        result = measure(folder)
    except _FAILURES as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {error}"
    return Turn(
        system=system,
        round=number,
        began=created,
        seconds=time.monotonic() - began,
        result=record.without_paths(result, work=folder),
        failed=record.without_paths(failed, work=folder),
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
