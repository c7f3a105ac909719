"""Random load for minutes: every answer is that of its solo run, and nothing leaks.

``make soak MINUTES=30`` runs it for as long as one likes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.support.layouts import A2F2, RUNNING, on, small
from tests.support.reference import Expect
from tests.support.seeds import fresh_seed
from tests.support.soak import soak
from tests.support.world import World

pytestmark = pytest.mark.integration

MINUTES = os.environ.get("SGLANG_AFD_SOAK_MINUTES")
"""Set by ``make soak``: how long the one soak takes that it runs."""
TOKENS = 280  # of a rank's pool: too few for all places at their longest
TIGHT = replace(
    small(A2F2),
    flags=(
        *small(A2F2).flags,
        *("--afd-max-tokens-per-rank", str(RUNNING)),  # all places fill a slice exactly
        *("--max-total-tokens", str(TOKENS), "--schedule-conservativeness", "0.3"),
    ),
    note="tight",
)


def lasting(minutes: float, *marks: pytest.MarkDecorator) -> Any:
    """A row of that length, with the time that a start and a slow machine take on top."""
    return pytest.param(minutes, marks=[*marks, pytest.mark.timeout(90 * minutes + 600)])


@on(TIGHT)
@pytest.mark.parametrize(
    "minutes",
    [lasting(float(MINUTES))] if MINUTES else [lasting(1), lasting(3, pytest.mark.full)],
)
def test_soak(world: World, expect: Expect, minutes: float) -> None:
    print(soak(world, expect, fresh_seed(), 60 * minutes))
