"""The pacer of an idle server: how long it waits, and what ends the wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from sglang_afd.upstream import idle
from sglang_afd.upstream.idle import LONGEST_WAIT_MS, WAKE, IdlePacer, without_wakes

pytestmark = pytest.mark.unit


class World:
    """A scheduler's sockets, steps and clock."""

    def __init__(self) -> None:
        context = zmq.Context.instance()
        self.inbox = context.socket(zmq.PULL)
        self.outbox = context.socket(zmq.PUSH)
        port = self.inbox.bind_to_random_port("tcp://127.0.0.1")
        self.outbox.connect(f"tcp://127.0.0.1:{port}")
        self.steps, self.now = 0, 100.0
        self.pacer = IdlePacer([self.inbox], lambda: self.steps, lambda: self.now)

    def close(self) -> None:
        self.inbox.close(0)
        self.outbox.close(0)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_the_wait_grows_and_is_bounded(world: World) -> None:
    waits = []
    for _ in range(200):
        waits.append(world.pacer.wait_ms())
        world.now += 0.1
    assert waits[0] == 0 and waits == sorted(waits) and waits[-1] == LONGEST_WAIT_MS


def test_a_step_ends_the_waiting(world: World) -> None:
    world.now += 60
    assert world.pacer.wait_ms() == LONGEST_WAIT_MS
    world.steps += 1
    assert world.pacer.wait_ms() == 0


def test_the_controller_wakes_the_pacer_and_keeps_it_awake(world: World) -> None:
    """The message of the controller's hook is what the pacer's rank drops."""
    from sglang.srt.managers.io_struct import sock_recv

    [hook] = [hook for hook in idle.HOOKS if hook.target.endswith("dispatching_with_trace")]
    world.now += 60
    hook.fn(None, SimpleNamespace(workers=[world.outbox]))
    assert world.inbox.poll(5000), "the message is under way"
    world.pacer.maybe_sleep()
    assert world.pacer.wait_ms() == 0
    assert without_wakes([sock_recv(world.inbox, zmq.NOBLOCK)]) == []


def test_without_a_message_it_waits(world: World) -> None:
    world.now += 60
    start = time.perf_counter()
    world.pacer.maybe_sleep()
    assert time.perf_counter() - start > LONGEST_WAIT_MS / 2000
    assert world.pacer.wait_ms() == LONGEST_WAIT_MS


def test_wakes_are_no_requests() -> None:
    assert without_wakes([WAKE, "request", WAKE], None) == ["request"]
    assert without_wakes(None, None) is None
    assert without_wakes([], None) == []
