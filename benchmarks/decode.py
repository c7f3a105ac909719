"""Steady decode of a served deployment: the step's time at a full batch, read from its log.

Every attention rank gets its batch at once, in one request: prompts of exactly `context` random
token ids, none sharing a prefix, and answers that nothing ends early.  Ranks that are done with
their prefills decode while others still prefill, so answers are longer than the counted steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.configuration import Steps, System
from benchmarks.models import Model, prepare
from benchmarks.progress import say
from benchmarks.steps import Asked, Judged, judge, steps_of
from benchmarks.systems import command_line, holdings, served
from sglang_afd.running import Server
from sglang_afd.upstream.decode_log import ENVIRONMENT, FLAGS, decode_lines
from sglang_afd.validate.answers import random_prompts

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
    if output is None:
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


def measure(name: str, configuration: Steps, work: Path) -> dict[str, Any]:
    """Serve the system `name` of `configuration` and measure its decode steps.

    Raises:
        ServerFailed: the server did not start.
        OSError: it broke off.
        NotAnswered: it answered otherwise than asked.
    """
    system = configuration.systems[name]
    load = load_of(configuration, system)
    model = prepare(configuration.model, {**configuration.overrides, **system.overrides}, work)
    args = command_line(
        system,
        model,
        dtype=configuration.dtype,
        requests=load.asked.batch,
        common=[*FLAGS, "--disable-radix-cache", *configuration.args],
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
        judged = drive(server, load, model)
        held = holdings(server)
    return {
        "start_seconds": server.start_seconds,
        "arguments": _without_paths(args, model),
        "output": load.output,
        "gpus": system.gpus,
        "requests": load.asked.batch * system.counted_ranks,
        "holdings": held,
        **msgspec.to_builtins(judged),
    }


class NotAnswered(RuntimeError):
    """A server's answer is not what was asked for."""


def drive(server: Server, load: Load, model: Model) -> Judged:
    """Ask a server that nobody else asks, and judge the steps that its log tells of.

    Raises:
        OSError: it broke off.
        NotAnswered: an answer is shorter or longer than asked.
    """
    before = server.log.stat().st_size
    asked = load.asked
    lengths = [asked.context] * (asked.batch * asked.ranks)
    prompts = random_prompts(lengths, vocab=model.vocabulary, seed=load.seed)

    def ask(rank: int) -> list[int]:
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
        lengths = [length for part in pool.map(ask, range(asked.ranks)) for length in part]
    if lengths != [load.output] * len(prompts):
        raise NotAnswered(f"answers of {sorted(set(lengths))} tokens, not of {load.output}")
    with server.log.open(errors="replace") as log:
        log.seek(before)
        steps = steps_of(decode_lines(log), asked)
    judged = judge(steps, warm_up=load.warm_up, count=load.steps, asked=asked)
    say(f"step {judged.ms or float('nan'):.3f} ms; {'; '.join(judged.problems) or 'counts'}")
    return judged


def _in_words(load: Load) -> str:
    asked = load.asked
    return (
        f"{asked.batch} requests of {asked.context} tokens on each of {asked.ranks} attention "
        f"ranks, {load.output} tokens out"
    )


def _without_paths(args: list[str], model: Model) -> list[str]:
    return ["MODEL" if arg == str(model.folder) else arg for arg in args]
