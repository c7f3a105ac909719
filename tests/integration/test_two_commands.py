"""A deployment as two commands, one for each role; here both run on one machine."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_afd.running import free_port
from sglang_afd.upstream import health
from tests.support.layouts import CHECKPOINTS
from tests.support.processes import scheduler, wait_until
from tests.support.reference import Expect, assert_equal
from tests.support.two_commands import command
from tests.support.workload import prompts, send
from tests.support.world import STOP, World

pytestmark = pytest.mark.integration

Start = Callable[..., World]
START_TIMEOUT = 20.0  # seconds, where a test waits for it to run out
END_WITHIN = 30.0  # seconds from the cause of an end to the last process's end


@pytest.fixture
def pair(start: Start) -> Callable[..., tuple[World, World]]:
    """Start both commands: ``pair(attention, ffn, *flags)``."""

    def run(attention: int, ffn: int, *flags: str) -> tuple[World, World]:
        port = free_port()
        return (
            start(command("attention", port, attention, ffn, *flags)),
            start(command("ffn", port, attention, ffn, *flags)),
        )

    return run


Pair = Callable[..., tuple[World, World]]


@pytest.mark.parametrize(
    ("attention", "ffn"),
    [
        (2, 1),
        pytest.param(1, 1, marks=pytest.mark.full),
        pytest.param(1, 2, marks=pytest.mark.full),
    ],
)
def test_tokens_equal_transformers(pair: Pair, expect: Expect, attention: int, ffn: int) -> None:
    """Equal and unequal counts; ending the attention command ends the FFN command too."""
    front, back = pair(attention, ffn)
    front.wait_healthy()
    asked = prompts()
    assert_equal(send(front, asked), expect(asked, 64))
    assert back.get("/health").status_code == 200, "the FFN command has a health endpoint"
    os.kill(front.pid, signal.SIGTERM)
    assert front.wait_ended(STOP) == 0
    assert back.wait_ended(STOP) == 0


def test_order_of_start(start: Start, expect: Expect) -> None:
    """Either command may come first."""
    port = free_port()
    ffn = start(command("ffn", port, 1, 1))
    assert wait_until(lambda: "starting 1 rank here" in ffn.log, 60), ffn.tail()
    front = start(command("attention", port, 1, 1)).wait_healthy()
    asked = prompts([9])
    assert_equal(send(front, asked, 8), expect(asked, 8))


@pytest.mark.parametrize(
    ("attention", "ffn", "named"),
    [
        (["--afd-max-tokens-per-rank", "16"], [], "max_tokens_per_rank is"),
        (["--afd-attention-ranks", "2"], [], "attention_ranks is"),
        (["--chunked-prefill-size", "512"], [], "chunked_prefill_size is"),
        (["--model-path", "seeded"], ["--model-path", "zeroed"], "weights is 2 safetensors"),
        ([], ["--disable-overlap-schedule"], "disable_overlap_schedule is"),
        pytest.param(["--load-format", "dummy"], [], "load_format is", marks=pytest.mark.full),
    ],
    ids=["afd-flag", "counts", "sglang-flag", "weights", "schedule", "load-format"],
)
def test_unequal_configuration(
    start: Start,
    checkpoints: Callable[[str], Path],
    attention: list[str],
    ffn: list[str],
    named: str,
) -> None:
    """Both commands end long before the start-up timeout; the error says what differs.

    The checkpoints ``seeded`` and ``zeroed`` differ in the values of the experts alone.
    """
    port = free_port()
    worlds = []
    for role, given in (("attention", attention), ("ffn", ffn)):
        flags = [str(checkpoints(f)) if f in CHECKPOINTS else f for f in given]
        worlds.append(start(command(role, port, 1, 1, *flags)))
    for world in worlds:
        assert world.wait_ended(END_WITHIN) == 1
    for world in worlds:
        assert f"configured differently: {named}" in world.last_line, world.tail()
        assert "start every command with the same flags" in world.log


def test_checkpoint_at_two_paths(
    start: Start, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """As on two hosts: equal files count, not where they lie."""
    port, there = free_port(), tmp_path / "there"
    shutil.copytree(checkpoints("embedded"), there)
    front = start(command("attention", port, 1, 1, "--model-path", str(checkpoints("embedded"))))
    start(command("ffn", port, 1, 1, "--model-path", str(there)))
    front.wait_healthy()


def test_one_http_port_for_both(start: Start) -> None:
    """Only one of the commands could listen there: both end at once, and say so."""
    port, http = free_port(), free_port()
    worlds = [start(command(role, port, 1, 1), port=http) for role in ("attention", "ffn")]
    for world in worlds:
        assert world.wait_ended(END_WITHIN) == 1
    for world in worlds:
        assert f"listen for HTTP at port {http} of this machine" in world.last_line, world.tail()


def test_ctrl_c(pair: Pair) -> None:
    """As a terminal does: to every process of the command.  No traceback; the peer ends too."""
    front, back = pair(1, 1)
    front.wait_healthy()
    os.killpg(front.pid, signal.SIGINT)
    assert front.wait_ended(STOP) == 130
    assert back.wait_ended(STOP) == 0
    for world in (front, back):
        assert "Traceback" not in world.log, world.tail()


def test_wrong_peer_address(start: Start) -> None:
    """The commands look for each other at different places: both end, naming the address."""
    timeout = ("--afd-startup-timeout", str(START_TIMEOUT))
    worlds = [start(command(role, free_port(), 1, 1, *timeout)) for role in ("attention", "ffn")]
    for world in worlds:
        assert world.wait_ended(START_TIMEOUT + END_WITHIN) != 0
        assert "--afd-startup-timeout" in world.log and "--dist-init-addr" in world.log, (
            world.tail()
        )


@pytest.mark.parametrize("role", [pytest.param("attention", marks=pytest.mark.full), "ffn"])
def test_killed_rank(pair: Pair, role: str) -> None:
    """kill -9 of a rank of either command ends both."""
    front, back = pair(1, 1)
    front.wait_healthy()
    rank, victim = (0, front) if role == "attention" else (1, back)
    name = f"{'attention' if role == 'attention' else 'FFN'} rank 0 (world rank {rank})"
    scheduler(victim.pid, rank).kill()
    for world in (front, back):
        assert world.wait_ended(END_WITHIN) == 1
        assert world.last_line.startswith("launch_server: error: "), world.tail()
    assert f"{name} was ended by SIGKILL" in victim.last_line, victim.tail()


@pytest.mark.full
def test_health_of_both_while_a_rank_hangs(pair: Pair) -> None:
    """Each command's endpoint tells of a rank that the other one has started, too."""
    front, back = pair(1, 1)
    front.wait_healthy()
    process = scheduler(back.pid, 1)
    process.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            asked = pool.submit(front.get, "/health")
            assert wait_until(lambda: back.get("/health").status_code == 503, health.FAILED_AFTER)
            assert asked.result().status_code == 503
            assert time.monotonic() - began < health.FAILED_AFTER
    finally:
        process.send_signal(signal.SIGCONT)
    for world in (front, back):
        assert wait_until(lambda: world.get("/health").status_code == 200, 20)  # noqa: B023
