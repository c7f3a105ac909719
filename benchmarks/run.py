"""Run a configuration: its systems take turns on this machine, A B A B, and a record is written."""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import decode, record, scripts, serving
from benchmarks.configuration import Configuration, Script, Serving, Steps, kind_of
from benchmarks.progress import say
from benchmarks.record import Record, Turn, Verdict
from sglang_afd.validate import environment

_FAILURES = (*decode.FAILURES, serving.BenchFailed, scripts.ScriptFailed)


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
    with _residents(configuration, work) as ready:
        for number in range(1, made.rounds + 1):
            for system in systems or [""]:
                say(f"{name}: round {number} of {made.rounds}" + (f", {system}" if system else ""))
                measure = _measured(system, configuration, ready, last=number == made.rounds)
                made.turns.append(_turn(system, number, work, measure))
                if draft is not None:
                    draft.write_bytes(record.encode(record.concluded(made)))
    return record.concluded(made)


def _residents(
    configuration: Configuration, work: Path
) -> AbstractContextManager[Mapping[str, decode.Ready | Exception]]:
    """The systems that stay up through all turns; none unless the configuration says so."""
    if isinstance(configuration, Steps) and configuration.resident:
        return decode.residents(configuration, work)
    return nullcontext({})


def _measured(
    system: str,
    configuration: Configuration,
    ready: Mapping[str, decode.Ready | Exception],
    *,
    last: bool,
) -> Callable[[Path], dict[str, Any]]:
    """What measures a turn of `system`, given a folder for it."""
    if isinstance(configuration, Steps) and configuration.resident:
        steps = configuration.profiled_steps if last else 0
        return lambda folder: decode.measure_on(ready[system], profiled_steps=steps)
    if isinstance(configuration, Steps):
        return partial(decode.measure, system, configuration)
    if isinstance(configuration, Serving):
        return partial(serving.measure, system, configuration)
    return partial(scripts.measure, configuration)


def _turn(system: str, number: int, work: Path, measure: Callable[[Path], dict[str, Any]]) -> Turn:
    """Logs of every turn are kept apart."""
    folder = work / f"{number}-{system or 'script'}"
    folder.mkdir(parents=True)
    began, created = time.monotonic(), _now()
    result: dict[str, Any] = {}
    failed = ""
    try:
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
