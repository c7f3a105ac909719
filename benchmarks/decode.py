"""Steady decode of a served deployment: the step's time at a full batch, read from its log.

Every attention rank gets its batch at once, in one request: prompts of exactly `context` random
token ids, none sharing a prefix, and answers that nothing ends early.  Ranks that are done with
their prefills decode while others still prefill, so answers are longer than the counted steps.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks import kernels
from benchmarks.configuration import Steps, System
from benchmarks.models import Model, NoModel, prepare
from benchmarks.progress import say
from benchmarks.steps import Asked, Judged, Step, judge, steps_of
from benchmarks.systems import command_line, holdings, served
from sglang_afd.running import Server, ServerFailed
from sglang_afd.upstream.decode_log import ENVIRONMENT, FLAGS, decode_lines
from sglang_afd.validate.answers import random_prompts


class NotAnswered(RuntimeError):
    """A server's answer is not what was asked for."""


FAILURES = (
    *(ServerFailed, NotAnswered, NoModel, kernels.NoProfile),
    *(OSError, http.client.HTTPException, ValueError, LookupError),
)
"""What a system that cannot be measured raises; the others still can."""

_CHUNK = 4096  # tokens of a prefill pass: at most so many passes go by while ranks wait for others
_SLACK = 8


class Load(NamedTuple):
    """What is asked of a server."""

    asked: Asked
    warm_up: int
    steps: int
    output: int
    seed: int
    timeout: float


def load_of(configuration: Steps, system: System) -> Load:
    """The load of one system."""
    batch = configuration.batch if system.batch is None else system.batch
    output = configuration.output
    if output is None and configuration.resident:
        output = configuration.warm_up + configuration.steps + 2 * _SLACK
    elif output is None:
        passes = -(-batch * configuration.context // _CHUNK)
        output = configuration.warm_up + configuration.steps + _SLACK + passes
    return Load(
        asked=Asked(
            ranks=system.ranks,
            lanes=system.lanes,
            batch=batch,
            context=configuration.context,
            graphs=system.graphs,
        ),
        warm_up=configuration.warm_up,
        steps=configuration.steps,
        output=output,
        seed=configuration.seed,
        timeout=configuration.answer_seconds,
    )


class Ready(NamedTuple):
    """A system that is up, and what it is to be asked."""

    system: System
    server: Server
    load: Load
    model: Model
    args: list[str]
    folder: Path
    """For its logs and profiles."""


def prepared(name: str, configuration: Steps, work: Path) -> Model:
    """The model of the system `name`; raises NoModel."""
    overrides = {**configuration.overrides, **configuration.systems[name].overrides}
    return prepare(configuration.model, overrides, work)


@contextmanager
def opened(name: str, configuration: Steps, model: Model, work: Path) -> Iterator[Ready]:
    """Serve the system `name` of `configuration` until the block ends.

    Raises:
        ServerFailed: the server did not start.
    """
    system = configuration.systems[name]
    load = load_of(configuration, system)
    cache = () if configuration.resident else ("--disable-radix-cache",)
    args = command_line(
        system,
        model,
        dtype=configuration.dtype,
        requests=load.asked.batch,
        common=[*FLAGS, *cache, *configuration.args],
    )
    with served(
        name,
        system,
        args,
        logs=work,
        timeout=configuration.start_seconds,
        environment=ENVIRONMENT,
    ) as server:
        say(f"{name} started in {server.start_seconds:.0f} s; {_in_words(load)}")
        yield Ready(system, server, load, model, args, work)


@contextmanager
def residents(configuration: Steps, work: Path) -> Iterator[dict[str, Ready | Exception]]:
    """Serve all systems at the same time, with the KV of their prompts in the prefix cache.

    One that did not start, or did not answer, is the error in its place.

    Raises:
        NoModel: a system's model cannot be made.
    """
    names = list(configuration.systems)
    folders = {name: work / name for name in names}
    for folder in folders.values():
        folder.mkdir(parents=True)
    models = {name: prepared(name, configuration, folders[name]) for name in names}
    with ExitStack() as stack:

        def ready(name: str) -> Ready | Exception:
            try:
                return stack.enter_context(opened(name, configuration, models[name], folders[name]))
            except FAILURES as error:
                return error

        with ThreadPoolExecutor(len(names)) as pool:
            found = dict(zip(names, pool.map(ready, names), strict=True))
        for name, one in found.items():
            if isinstance(one, Ready):
                say(f"{name} makes its prompts' KV")
                try:
                    ask(one.server, one.load._replace(output=1), one.model)
                except FAILURES as error:
                    found[name] = error
        yield found


def measure(name: str, configuration: Steps, work: Path) -> dict[str, Any]:
    """Serve the system `name` of `configuration` and measure its decode steps; raises as
    `prepared`, `opened` and `measure_on`."""
    model = prepared(name, configuration, work)
    with opened(name, configuration, model, work) as ready:
        return measure_on(ready, profiled_steps=configuration.profiled_steps)


def measure_on(ready: Ready | Exception, *, profiled_steps: int = 0) -> dict[str, Any]:
    """Measure the decode steps of a system that is up, and then profile some, if asked to.

    Raises:
        Exception: `ready`, if it is one.
        OSError: the server broke off.
        NotAnswered: it answered otherwise than asked.
    """
    if isinstance(ready, Exception):
        raise ready
    system, server, load, model, args, _ = ready
    judged = drive(server, load, model)
    profile = _profile(ready, profiled_steps) if profiled_steps else {}
    return {
        "start_seconds": server.start_seconds,
        "arguments": _without_paths(args, model),
        "output": load.output,
        "gpus": system.gpus,
        "requests": load.asked.batch * system.counted_ranks,
        "holdings": holdings(server),
        **msgspec.to_builtins(judged),
        **profile,
    }


def _profile(ready: Ready, steps: int) -> dict[str, Any]:
    """What every rank's GPU did in some steps, or why that is not known: the steps measured before
    stand without it."""
    try:
        return {"profile": msgspec.to_builtins(_profiled(ready, steps))}
    except FAILURES as error:
        return {"profile_failed": f"{type(error).__name__}: {error}"}


def _profiled(ready: Ready, steps: int) -> list[kernels.Gpu]:
    """Ask once more, and profile some steps at the full batch."""
    server, load = ready.server, ready.load
    folder = ready.folder / "profile"
    folder.mkdir(exist_ok=True)
    passes = steps * load.asked.lanes
    longer = load._replace(output=load.output + 3 * steps)
    with ThreadPoolExecutor(1) as pool:
        before = server.log.stat().st_size
        answers = pool.submit(ask, server, longer, ready.model)
        while not answers.done() and not _is_full(server, before, load.asked):
            time.sleep(0.02)
        body = {"output_dir": str(folder), "num_steps": passes, "with_stack": False}
        server.post("/start_profile", body, timeout=load.timeout)
        answers.result()
    return kernels.of_folder(folder, steps, load.timeout)


def _is_full(server: Server, offset: int, asked: Asked) -> bool:
    """Whether a step at the full batch is in the log behind `offset`."""
    steps = _steps_since(server, offset, asked)
    return any(step.requests == [asked.batch] * asked.ranks for step in steps)


def _steps_since(server: Server, offset: int, asked: Asked) -> list[Step]:
    """The steps that the server's log tells of behind `offset`, in bytes."""
    with server.log.open(errors="replace") as log:
        log.seek(offset)
        return steps_of(decode_lines(log), asked)


def drive(server: Server, load: Load, model: Model) -> Judged:
    """Ask a server that nobody else asks, and judge the steps that its log tells of.

    Raises:
        OSError: it broke off.
        NotAnswered: an answer is shorter or longer than asked.
    """
    before = server.log.stat().st_size
    ask(server, load, model)
    steps = _steps_since(server, before, load.asked)
    judged = judge(steps, warm_up=load.warm_up, count=load.steps, asked=load.asked)
    say(f"step {judged.ms or float('nan'):.3f} ms; {'; '.join(judged.problems) or 'counts'}")
    return judged


def ask(server: Server, load: Load, model: Model) -> None:
    """Send every attention rank its batch at once; raises as `drive`."""
    asked = load.asked
    lengths = [asked.context] * (asked.batch * asked.ranks)
    prompts = random_prompts(lengths, vocab=model.vocabulary, seed=load.seed)

    def of_rank(rank: int) -> list[int]:
        body: Mapping[str, Any] = {
            "input_ids": prompts[rank * asked.batch : (rank + 1) * asked.batch],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": load.output,
                "ignore_eos": True,
            },
            **({"routed_dp_rank": rank} if asked.ranks > 1 else {}),
        }
        answers = server.call("/generate", dict(body), timeout=load.timeout)
        return [answer["meta_info"]["completion_tokens"] for answer in answers]

    with ThreadPoolExecutor(asked.ranks) as pool:
        lengths = [length for part in pool.map(of_rank, range(asked.ranks)) for length in part]
    if lengths != [load.output] * len(prompts):
        raise NotAnswered(f"answers of {sorted(set(lengths))} tokens, not of {load.output}")


def _in_words(load: Load) -> str:
    asked = load.asked
    return (
        f"{asked.batch} requests of {asked.context} tokens on each of {asked.ranks} attention "
        f"ranks, {load.output} tokens out"
    )


def _without_paths(args: list[str], model: Model) -> list[str]:
    return ["MODEL" if arg == str(model.folder) else arg for arg in args]
