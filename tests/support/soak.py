"""A soak: random load in rounds, and after each a look at what the server's processes hold."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from statistics import linear_regression
from typing import NamedTuple

import psutil

from tests.support.layouts import CHUNK, RUNNING
from tests.support.processes import title, wait_until
from tests.support.random_load import (
    KINDS,
    STREAM,
    Arrival,
    answers_alone,
    arrivals,
    known_prompts,
    nothing_left,
    run,
)
from tests.support.reference import Expect
from tests.support.workload import VOCABULARY, Prompt
from tests.support.world import World

PER_ROUND = 20  # requests, beside those that fill every place
_FULL_HOUSE_TOKENS = 24
_DISTINCT = 6  # prompts that no other continues
_PRIORITIES = (0, 5, 20)  # the last takes a running request's place
_FORGET_EVERY = 3  # rounds after which the prefix cache is emptied

SETTLED = 1 / 3  # share of a soak after which a process holds all that it needs
_FEWEST = 3  # settled samples from which growth can be told
SPARE_HANDLES = 4
SPARE_MEMORY = 0.05
"""Share of its memory by which a process may grow once it has settled: its caches still do."""


class Use(NamedTuple):
    """What one process holds."""

    handles: int
    memory: int
    """Bytes resident."""


class Sample(NamedTuple):
    """What the processes of a server hold, by their names, `seconds` after the soak began."""

    seconds: float
    uses: dict[str, Use]


def soak(world: World, expect: Expect, seed: int, seconds: float) -> str:
    """Load `world` for `seconds`; what was done, in a line.

    Raises:
        AssertionError: an answer is not that of its solo run, or something leaks.
    """
    draw = random.Random(seed)
    known = known_prompts(seed, _DISTINCT)
    same = [(draw.randrange(16, VOCABULARY),) * (CHUNK // RUNNING) for _ in range(2)]
    alone = answers_alone(world, expect, [*known, *same], constrained=True)
    samples: list[Sample] = []
    asked: Counter[str] = Counter()
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        made = [*_full_house(draw.choice(same)), *_mixed(known, draw)]
        asked.update(arrival.kind for arrival in made)
        wrong = run(world, made, alone)
        assert not wrong, (
            f"seed {seed}, round {len(samples)}: {len(wrong)} differ, first {wrong[0]}"
        )
        assert wait_until(lambda: _requests(world) == 0, 10), _requests(world)
        if len(samples) % _FORGET_EVERY == 0:
            nothing_left(world)
        samples.append(Sample(time.monotonic() - began, _uses(world)))
    nothing_left(world)
    found = leaks(samples)
    assert not found, f"seed {seed}, {len(samples)} rounds: {found}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(asked.items()))
    taken = world.log.count("Retract requests")
    judged = "no leak" if len(_settled(samples)) >= _FEWEST else "too few rounds to tell of leaks"
    return f"{len(samples)} rounds in {seconds:.0f} s: {kinds}; {taken} retractions; {judged}"


def leaks(samples: Sequence[Sample]) -> list[str]:
    """What grows without bound, a line for each process and kind; none of a few samples."""
    settled = _settled(samples)
    if len(settled) < _FEWEST:
        return []
    found = []
    for name, first in settled[0].uses.items():
        uses = [sample.uses.get(name, first) for sample in settled]
        grown = _growth(settled, [use.handles for use in uses])
        if grown > SPARE_HANDLES:
            found.append(f"{name} has {grown:.0f} more files open, {first.handles} before")
        grown = _growth(settled, [use.memory for use in uses])
        if grown > SPARE_MEMORY * first.memory:
            found.append(
                f"{name} has grown by {grown / 2**20:.0f} MB of {first.memory / 2**20:.0f}"
            )
    return found


def _settled(samples: Sequence[Sample]) -> list[Sample]:
    return [s for s in samples if s.seconds >= SETTLED * samples[-1].seconds]


def _growth(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """By how much the line through `values` rises from the first of the samples to the last."""
    times = [sample.seconds for sample in samples]
    return linear_regression(times, values).slope * (times[-1] - times[0])


def _full_house(prompt: Prompt) -> list[Arrival]:
    """Every place of both attention ranks at once: a chunk's rows, and then a slice's, exactly.

    All tokens of a prompt are the same, and so go to the same experts.
    """
    return [
        Arrival(
            prompt, _FULL_HOUSE_TOKENS, 0.0, None, STREAM, {"routed_dp_rank": rank, "priority": 5}
        )
        for rank in (0, 1)
        for _ in range(RUNNING)
    ]


def _mixed(known: Sequence[Prompt], draw: random.Random) -> list[Arrival]:
    made = arrivals(known, draw.randrange(2**31), PER_ROUND, KINDS)
    return [a._replace(fields={"priority": draw.choice(_PRIORITIES)}) for a in made]


def _requests(world: World) -> int:
    loads = world.get("/v1/loads").json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def _uses(world: World) -> dict[str, Use]:
    uses = {}
    for process in world.processes():
        try:
            name = f"{title(process)[:40]} ({process.pid})"
            uses[name] = Use(process.num_fds(), process.memory_info().rss)
        except psutil.NoSuchProcess:
            continue  # a helper of the moment
    return uses
