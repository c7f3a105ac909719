"""Several lanes: the same tokens as with one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.layouts import A2F1, Layout, on, small
from tests.support.reference import Expect, check
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = pytest.mark.integration


def lanes(layout: Layout, count: int) -> Layout:
    return replace(
        layout, flags=(*layout.flags, "--afd-lanes", str(count)), note=f"{layout.note}-lanes{count}"
    )


@on(lanes(small(A2F1), 2))
def test_tokens(world: World, expect: Expect) -> None:
    check(world, expect, prompts(), 64)
