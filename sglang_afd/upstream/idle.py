"""An idle server sleeps: the rank that paces the others waits on its sockets.

SGLang's scheduler spins while it has nothing to run.  In a world of several ranks every iteration
starts with a broadcast from rank 0 and ends in a gather over all ranks, so rank 0 paces the rest,
which block in gloo (a blocking wait, no spin) until it comes round.  It is therefore enough that
rank 0 alone sleeps.  Whatever ends the sleep is a message on its sockets: its own requests, control
messages, and a `WAKE` that the DP controller sends it with each request for any rank.

The wait grows with the time that the world has been idle, and is zero in the first milliseconds
after a step or a message, so that a busy server never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from sglang_afd.upstream.hooks import Hook, Kind

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

WAKE = b"sglang_afd: wake"
"""Message to rank 0: another rank has work."""

LONGEST_WAIT_MS = 3000
"""An iteration takes every rank 2 ms of CPU when it follows the last at once, and 5 to 80 ms after
a pause in which the caches were lost (measured on two virtual cores, differing by the hour): at ten
iterations a second three ranks used up to a quarter of the cores, at one up to an eighth."""

_IDLE_MS_PER_WAIT_MS = 4
"""The wait is this fraction of the idle time: what becomes ready without a message (a compiled
grammar, for one) is seen at most that much later than it took."""


class IdlePacer:
    """Stands in for SGLang's ``IdleSleeper`` on the rank that paces the others.

    Args:
        sockets: what wakes this rank.
        steps: how many steps this rank has run so far; a change means that the world had work.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        sockets: list[zmq.Socket],
        steps: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._steps = steps
        self._clock = clock
        self._seen_steps = steps()
        self._idle_since = clock()

    def wait_ms(self) -> int:
        """How long to wait now: 0 just after a step, growing to `LONGEST_WAIT_MS`."""
        steps, now = self._steps(), self._clock()
        if steps != self._seen_steps:
            self._seen_steps, self._idle_since = steps, now
        idle_ms = (now - self._idle_since) * 1000
        return min(LONGEST_WAIT_MS, int(idle_ms / _IDLE_MS_PER_WAIT_MS))

    def maybe_sleep(self) -> None:
        """Wait for a message, `wait_ms` at most; a message means that work may follow."""
        wait = self.wait_ms()
        if wait and self._poller.poll(wait):
            self._idle_since = self._clock()


def without_wakes(messages: list[Any] | None, *_: Any) -> list[Any] | None:
    """Drop the `WAKE` messages among those that a rank has received (None: it receives none)."""
    return messages and [message for message in messages if message != WAKE]


def _pace(_: None, scheduler: Any) -> None:
    """Give rank 0 the pacer; the other ranks must not sleep on their own, or waits add up."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.pp_rank or parallel.tp_rank:
        scheduler.idle_sleeper = None
        return
    channels = scheduler.ipc_channels
    sockets = [channels.recv_from_tokenizer, channels.recv_from_rpc]
    if all(isinstance(socket, zmq.Socket) for socket in sockets):
        scheduler.idle_sleeper = IdlePacer(sockets, lambda: scheduler.forward_ct)


def _sleep_while_paused(_: None, scheduler: Any) -> None:
    scheduler.maybe_sleep_on_idle()


def _wake(_: None, controller: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.managers.io_struct import sock_send

    sock_send(controller.workers[0], WAKE)


HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_SCHEDULER}.init_idle_sleeper",
        Kind.AFTER,
        _pace,
        "an idle scheduler spins; --sleep-on-idle waits a second at every rank in turn",
    ),
    Hook(
        f"{_SCHEDULER}._record_scheduler_state_for_paused_engine",
        Kind.AFTER,
        _sleep_while_paused,
        "a paused engine spins too, and never reaches the idle sleeper",
    ),
    Hook(
        "sglang.srt.managers.data_parallel_controller.DataParallelController"
        ".dispatching_with_trace",
        Kind.AFTER,
        _wake,
        "a request for another rank must not wait until rank 0 wakes by itself",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
        "._pull_raw_reqs",
        Kind.AFTER,
        without_wakes,
        "the scheduler has no handler for the wake-up message",
    ),
)
