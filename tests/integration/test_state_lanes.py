"""Recurrent states and several lanes: each request's tokens are those of its solo run."""

from __future__ import annotations

import pytest

from tests.integration.test_state_schedules import TINY, schedules
from tests.support.layouts import lanes, on
from tests.support.reference import Expect
from tests.support.world import World

pytestmark = pytest.mark.integration


@pytest.mark.full
@on(lanes(TINY, 2))
def test_random_schedules_in_lanes(world: World, expect: Expect) -> None:
    """Through a pool that holds two or three requests."""
    schedules(world, expect, 10)
