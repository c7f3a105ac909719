"""``--afd-restart``: the deployment comes back behind a port that stays."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import Answer, request_body
from tests.support.processes import scheduler, wait_until
from tests.support.reference import Expect, assert_equal, check
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

RANKS = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", "--dtype", "float32")
GONE_WITHIN = 15.0  # seconds from the last death until nothing is left
NEW_TOKENS = 300


def test_restart(start: Callable[..., World], expect: Expect) -> None:
    """The FFN rank dies in mid-request: what ran and what came meanwhile is answered, and right.

    The second death is one more than may be: the command ends with the world's status.
    """
    world = start([*RANKS, "--afd-restart", "1"]).wait_healthy()
    ran, streamed, waited = prompts([20, 30, 9], seed=81)
    with ThreadPoolExecutor(3) as pool:
        plain = pool.submit(world.generate, ran, NEW_TOKENS, return_logprob=True)
        stream = world.stream(streamed, 3000)
        next(stream)
        running = lambda: world.get("/v1/loads").json()["loads"][0]["num_running_reqs"]  # noqa: E731
        assert wait_until(lambda: running() == 2, 20), running()
        assert not plain.done()
        scheduler(world.pid, 1).kill()
        assert wait_until(lambda: world.get("/health").status_code == 503, 15)
        late = pool.submit(send, world, [waited], 8)
        *_, last = stream
        assert last["meta_info"]["finish_reason"]["status_code"] == 503
        assert_equal([plain.result(120)], expect([ran], NEW_TOKENS))
        assert_equal(late.result(60), expect([waited], 8))
    assert "started again (1 of 1 times)" in world.log
    world.wait_healthy()
    check(world, expect, [waited], 8)
    scheduler(world.pid, 0).kill()
    assert world.wait_gone(GONE_WITHIN) == 1
    assert world.last_line.startswith("launch_server: error: attention rank 0"), world.tail()


@pytest.mark.full
def test_requests_fail_by_policy(start: Callable[..., World], expect: Expect) -> None:
    """And a stop is the world's: running requests end first, with status 0."""
    flags = ("--afd-restart", "1", "--afd-restart-requests", "fail")
    world = start([*RANKS, *flags]).wait_healthy()
    [prompt] = prompts([20], seed=82)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(world.post, "/generate", request_body(prompt, 3000))
        running = lambda: world.get("/v1/loads").json()["loads"][0]["num_running_reqs"]  # noqa: E731
        assert wait_until(lambda: running() == 1, 20), running()
        scheduler(world.pid, 1).kill()
        response = answer.result(30)
        assert response.status_code == 503 and "send the request again" in response.text
        again = pool.submit(world.post, "/generate", request_body(prompt, 8, return_logprob=True))
        assert_equal([Answer.of(again.result(120).json())], expect([prompt], 8))
    world.stop()
