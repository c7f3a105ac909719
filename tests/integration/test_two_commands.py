"""A deployment as two commands, one for each role; here both run on one machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.processes import scheduler
from tests.support.reference import Expect, assert_equal
from tests.support.workload import prompts, send
from tests.support.world import STOP, World, free_port

pytestmark = pytest.mark.integration

Start = Callable[..., World]
START_TIMEOUT = 20.0  # seconds, where a test waits for it to run out
END_WITHIN = 30.0  # seconds from the cause of an end to the last process's end


def command(role: str, port: int, attention: int, ffn: int, *flags: str) -> list[str]:
    """One role's flags; both commands meet at `port`."""
    return [
        *("--afd-attention-ranks", str(attention), "--afd-ffn-ranks", str(ffn)),
        *("--afd-role", role, "--nnodes", "2", "--node-rank", "01"[role == "ffn"]),
        *("--dist-init-addr", f"127.0.0.1:{port}", "--dtype", "float32"),
        *flags,
    ]


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
    back.wait_ended(STOP)


def test_order_of_start(start: Start, expect: Expect) -> None:
    """Either command may come first."""
    port = free_port()
    start(command("ffn", port, 1, 1))
    time.sleep(3)
    front = start(command("attention", port, 1, 1)).wait_healthy()
    asked = prompts([9])
    assert_equal(send(front, asked, 8), expect(asked, 8))


def test_unequal_configuration(start: Start) -> None:
    """Both commands end; the error says what differs, on which ranks."""
    port = free_port()
    front = start(command("attention", port, 1, 1, "--afd-max-tokens-per-rank", "16"))
    back = start(command("ffn", port, 1, 1, "--afd-max-tokens-per-rank", "32"))
    for world in (front, back):
        assert world.wait_ended(60) != 0
    logs = front.log + back.log
    assert "configured differently: max_tokens_per_rank is" in logs, logs[-4000:]
    assert "start every command with the same flags" in logs


def test_unequal_counts(start: Start) -> None:
    """Commands that disagree on the world never meet: the start-up timeout ends both."""
    port = free_port()
    timeout = ("--afd-startup-timeout", str(START_TIMEOUT))
    worlds = (
        start(command("attention", port, 2, 1, *timeout)),
        start(command("ffn", port, 1, 1, *timeout)),
    )
    for world in worlds:
        assert world.wait_ended(START_TIMEOUT + END_WITHIN) != 0
    assert any("--afd-" in world.log for world in worlds)


def test_wrong_peer_address(start: Start) -> None:
    """The commands look for each other at different places: both end, naming the address."""
    timeout = ("--afd-startup-timeout", str(START_TIMEOUT))
    worlds = [start(command(role, free_port(), 1, 1, *timeout)) for role in ("attention", "ffn")]
    for world in worlds:
        assert world.wait_ended(START_TIMEOUT + END_WITHIN) != 0
        assert "--afd-startup-timeout" in world.log and "--dist-init-addr" in world.log, (
            world.tail()
        )


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_killed_rank(pair: Pair, role: str) -> None:
    """kill -9 of a rank of either command ends both."""
    front, back = pair(1, 1)
    front.wait_healthy()
    rank, victim = (0, front) if role == "attention" else (1, back)
    scheduler(victim.pid, rank).kill()
    for world in (front, back):
        assert world.wait_ended(END_WITHIN) != 0
