"""Decode steps: out of the log's lines, proven to be at the full batch, and judged.

A step counts if every attention rank ran its full batch in it, at the asked context or beyond, and
the forward pass before it was such a step too, so that no prefill is inside its time.  Up to 3 of
15 steps may be left out, as not counting or as farthest from the median.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sglang_afd.upstream.decode_log import DecodeLine

SPREAD = 0.03
"""Most that kept steps may differ, (slowest - fastest) / median; also of turns and references."""
KEPT = 0.8
"""Least share of the window's steps that must be kept: 12 of 15."""


class Step(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One decode step of the whole batch; lists have one entry an attention rank."""

    iteration: int
    """Number of its first forward pass: one a lane."""
    ms: float
    requests: list[int]
    tokens: list[int]
    """KV tokens of the rank's requests after the step, lanes together."""
    graph: bool
    """Whether every rank replayed it from graphs."""
    problem: str
    """Why it does not count; empty: it does."""
    kept: bool = False


class Asked(NamedTuple):
    """What a full step is."""

    ranks: int
    lanes: int
    batch: int
    """Requests on each rank, lanes together."""
    context: int
    graphs: bool


class Judged(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The window of counted steps, and what came out."""

    steps: list[Step]
    """The window, in order."""
    ms: float | None
    """Median of the kept steps."""
    spread: float | None
    problems: list[str]
    """Why the measurement does not count; empty: it does."""


def steps_of(lines: Sequence[DecodeLine], asked: Asked) -> list[Step]:
    """The steps that all ranks' lines tell of, in order.

    With several lanes a step is a forward pass of each lane.  A line counts the requests of all of
    a rank's lanes and the tokens of its own since the line before, of whichever lane: lanes that
    share the batch evenly have lines of `lanes` times the time that passed between them.
    """
    by_iteration: dict[int, dict[int, DecodeLine]] = defaultdict(dict)
    for line in lines:
        by_iteration[line.iteration][line.rank] = line
    steps: list[Step] = []
    group: list[int] = []
    last = None  # the pass that ended the full step before
    for iteration in sorted(by_iteration):
        if not _lane_is_full(by_iteration[iteration], asked):
            steps.append(_step(iteration, [by_iteration[iteration]], asked, None))
            group, last = [], None
            continue
        if group and iteration != group[-1] + 1:
            group = []
        group.append(iteration)
        if len(group) == asked.lanes:
            passes = [by_iteration[number] for number in group]
            steps.append(_step(group[0], passes, asked, last))
            group, last = [], iteration
    return steps


def _lane_is_full(found: dict[int, DecodeLine], asked: Asked) -> bool:
    full = all(line.requests == asked.batch for line in found.values())
    return full and len(found) == asked.ranks


def _step(first: int, passes: list[dict[int, DecodeLine]], asked: Asked, last: int | None) -> Step:
    """The step of some passes; `last`: the pass that ended the full step just before, if any."""
    ranks = sorted({rank for found in passes for rank in found})
    # a rank's lines count all its requests and their tokens, whatever the lane
    requests = [max(f[rank].requests for f in passes if rank in f) for rank in ranks]
    tokens = [max(f[rank].tokens for f in passes if rank in f) for rank in ranks]
    graph = all(line.graph for found in passes for line in found.values())
    problem = ""
    if requests != [asked.batch] * asked.ranks:
        problem = f"requests {requests}, not {asked.batch} on each of {asked.ranks} ranks"
    elif min(tokens) < asked.batch * asked.context:
        problem = f"{min(tokens)} tokens on a rank, less than {asked.batch} x {asked.context}"
    elif last is None or first != last + 1:
        problem = "another pass came before it"
    elif asked.graphs and not graph:
        problem = "not replayed from graphs"
    return Step(
        iteration=first,
        # ranks go in step with each other: their mean is what a step took
        ms=sum(statistics.mean(line.ms for line in found.values()) for found in passes)
        / asked.lanes,
        requests=requests,
        tokens=tokens,
        graph=graph,
        problem=problem,
    )


def judge(steps: Sequence[Step], *, warm_up: int, count: int, asked: Asked) -> Judged:
    """Choose the window, keep its steps, and say why it does not count, if so.

    The window begins `warm_up` steps behind the first one at the full batch and has `count` steps.
    """
    target = [asked.batch] * asked.ranks
    full = [index for index, step in enumerate(steps) if step.requests == target]
    if not full:
        most = max((sum(step.requests) for step in steps), default=0)
        return Judged(steps=[], ms=None, spread=None, problems=[
            f"the batch was never full: {most} requests at most, not {sum(target)}; more KV cache, "
            f"a smaller batch or longer answers are needed"
        ])  # fmt: skip
    start = full[0] + warm_up
    window = list(steps[start : start + count])
    good = [step for step in window if not step.problem]
    needed = math.ceil(round(count * KEPT, 6))
    while len(good) > needed and _spread(good) > SPREAD:
        middle = statistics.median(step.ms for step in good)
        good.remove(max(good, key=lambda step: abs(step.ms - middle)))
    for step in good:
        step.kept = True
    problems = []
    if len(window) < count:
        problems.append(f"only {len(window)} of {count} steps came before the batch ended")
    if len(good) < needed:
        why = next((step.problem for step in window if step.problem), "")
        problems.append(
            f"{len(good)} of {count} steps kept, at least {needed} are needed"
            + (f": {why}" if why else "")
        )
    if not good:
        return Judged(steps=window, ms=None, spread=None, problems=problems)
    spread = _spread(good)
    if spread > SPREAD:
        problems.append(f"the kept steps spread by {spread:.1%}, more than {SPREAD:.0%}")
    return Judged(
        steps=window,
        ms=statistics.median(step.ms for step in good),
        spread=spread,
        problems=problems,
    )


def _spread(steps: Sequence[Step]) -> float:
    return spread([step.ms for step in steps])


def spread(values: Sequence[float]) -> float:
    """(Largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)
