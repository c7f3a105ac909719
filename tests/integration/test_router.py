"""SGLang's router in front of a deployment: one server, with the DP ranks that take requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_afd.running import free_port
from tests.support.client import Client
from tests.support.layouts import SMALL, on
from tests.support.processes import wait_until
from tests.support.reference import Expect, check
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = [pytest.mark.integration, on(SMALL)]

START = 60.0  # seconds; it takes two, most of them for its look at the server


@contextmanager
def routing(world: World, log: Path, *flags: str) -> Iterator[Client]:
    """A router before `world` that has found it."""
    router = Client(free_port())
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(router.port), "--prometheus-port", str(free_port())),
        *("--worker-urls", world.url, *flags),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        return "marked as healthy" in log.read_text()

    try:
        assert wait_until(ready, START), log.read_text()[-2000:]
        yield router
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("flags", [(), ("--policy", "round_robin", "--dp-aware")], ids=["", "dp"])
def test_router(world: World, expect: Expect, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Answers are the model's, streamed and whole; a router that names ranks uses all of A's."""
    with routing(world, tmp_path / "router.log", *flags) as router:
        asked = prompts([5, 40, 20, 9], seed=72)
        answers = [answer for one in asked for answer in check(router, expect, [one], 8)]
        assert {answer.dp_rank for answer in answers} == {0, 1}
        [*_, last] = router.stream(asked[0], 8)
        assert tuple(last["output_ids"]) == expect(asked[:1], 8)[0].tokens
        question = "Explain the `with` statement."
        assert router.chat(question)["choices"] == world.chat(question)["choices"]
