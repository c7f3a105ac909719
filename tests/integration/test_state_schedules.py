"""Gated delta net: whatever runs beside a request, its states are moved by its own tokens alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.layouts import A2F1, on, small
from tests.support.random_load import (
    answers_alone,
    arrivals,
    known_prompts,
    nothing_left,
    run,
)
from tests.support.reference import Expect, check
from tests.support.seeds import fresh_seed
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = pytest.mark.integration

_POOL = ("--max-total-tokens", "280", "--schedule-conservativeness", "0.3")
TINY = replace(small(A2F1).of("qwen3.5"), note="tiny", flags=(*small(A2F1).flags, *_POOL))
"""A pool that holds two or three requests, so that some are taken back and computed anew."""
_STATES = ("--max-mamba-cache-size", "48")  # of two attention ranks
KEPT = replace(
    small(A2F1).of("qwen3.5"),
    note="no buffer",
    flags=(
        *(*small(A2F1).flags, *_STATES, "--disable-overlap-schedule"),
        *("--mamba-radix-cache-strategy", "no_buffer"),
    ),
)
TRACKED = replace(
    small(A2F1).of("qwen3.5"),
    note="extra buffer",
    flags=(
        *(*small(A2F1).flags, *_STATES, "--mamba-radix-cache-strategy", "extra_buffer"),
        *("--mamba-track-interval", "64"),
    ),
)


def schedules(world: World, expect: Expect, count: int) -> None:
    """Random schedules of prefill, decode, idle, abort and retraction, one after the other."""
    seed = fresh_seed()
    draw = random.Random(seed)
    known = known_prompts(seed, 4)
    alone = answers_alone(world, expect, known, constrained=False, ends={2})
    for number in range(count):
        made = arrivals(known, draw.randrange(2**31), draw.choice((1, 2, 4, 20)))
        wrong = run(world, made, alone)
        assert not wrong, f"seed {seed}, schedule {number}: {wrong[0]}"
    nothing_left(world)


@on(KEPT, TRACKED)
def test_settings_of_the_states_cache(world: World, expect: Expect) -> None:
    """Tokens, hits of the radix cache, and a share of the states for each attention rank."""
    assert "max_mamba_cache_size: 24," in world.log
    [stem] = prompts([150], seed=51)
    tails = prompts([5, 9, 1, 30], seed=52)
    check(world, expect, [stem], 80, routed_dp_rank=0)
    answers = check(world, expect, [stem + tail for tail in tails], 16, routed_dp_rank=0)
    assert all(answer.cached_tokens >= 64 for answer in answers), answers
    nothing_left(world)


@on(TINY)
def test_random_schedules(world: World, expect: Expect) -> None:
    schedules(world, expect, 10)


@pytest.mark.full
@pytest.mark.timeout(1800)
@on(TINY)
def test_many_random_schedules(world: World, expect: Expect) -> None:
    """And memory was short in some of them."""
    before = world.log.count("Retract requests")
    schedules(world, expect, 200)
    assert world.log.count("Retract requests") > before
