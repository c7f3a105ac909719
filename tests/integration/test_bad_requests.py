"""Whatever comes over HTTP: no status 5xx, lost answer or crash that SGLang does not give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import requests

from tests.support.bad_requests import Request, described
from tests.support.layouts import A2F1, Layout, small
from tests.support.reference import Expect, check
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = pytest.mark.integration

LEFT_OUT = frozenset(
    {
        "/configure_logging",  # writes requests to the disk
        "/pause_generation",  # what it says, for every request after it
        "/scale_elastic_ep",
        "/set_internal_state",
        "/slow_down",
        "/start_profile",
        "/stop_profile",
    }
)
"""What changes how the server goes on."""
STANDSTILL = 20.0  # seconds without an answer and without a token on any rank
HEALTHY = 30.0  # seconds until what was generated for requests given up is aborted
CONTEXT = 512  # tokens: what a request without a limit of its own generates at most


def tokens_held(world: World) -> object:
    """What changes with every token of a request that runs."""
    try:
        loads = world.get("/v1/loads", timeout=5).json()["loads"]
    except requests.RequestException:
        return None
    return [load["num_used_tokens"] for load in loads]


def wrong(world: World, asked: list[Request]) -> dict[Request, int | None]:
    """The requests that end in a status of 5xx, or without an answer, and the status."""
    found = {one: one.send(world.url, STANDSTILL, lambda: tokens_held(world)) for one in asked}
    return {request: s for request, s in found.items() if s is None or s >= 500}


EXAMPLES = [2, pytest.param(20, marks=pytest.mark.full)]
_SMALL = small(A2F1)
WORLD: list[Layout] = [
    replace(_SMALL, flags=(*_SMALL.flags, "--context-length", str(CONTEXT)), note="short")
]


@pytest.mark.parametrize("world", WORLD, indirect=True, ids=str)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_no_worse_than_sglang(
    world: World, examples: int, request: pytest.FixtureRequest, expect: Expect
) -> None:
    """Every path of the server's own description, asked rightly and wrongly."""
    asked = described(world.get("/openapi.json").json(), LEFT_OUT, examples)
    assert len(asked) > 100
    found = wrong(world, asked)
    assert world.exit_code is None, world.tail()
    assert world.get("/health", timeout=HEALTHY).status_code == 200
    check(world, expect, prompts()[:2], 8)
    if found:
        theirs = wrong(request.getfixturevalue("stock"), list(found))
        worse = [f"{status}: {one}" for one, status in found.items() if one not in theirs]
        assert not worse, "\n".join(worse)
