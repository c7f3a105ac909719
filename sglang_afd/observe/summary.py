"""How busy a rank was in the last seconds, for people who look at it."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from sglang_afd.observe.stages import StepTimes

WINDOW = 10.0  # seconds
_TOLD = 0.9
"""Share of steps whose stages must be known; the first ones of a graph's may not be."""


class Summary(msgspec.Struct, frozen=True):
    """One rank's last `WINDOW` seconds; shares are of that time."""

    seconds: float
    """How long the rank has been watched, at most `WINDOW`."""
    steps: int
    rows: int
    """Of its own steps; on F ranks of everybody's."""
    working: float | None
    """Share of its role's own work; None if nothing tells most steps' stages."""
    exchanging: float | None
    """Share of sending, waiting for the other role and taking in, within steps."""


class RecentSteps:
    """Remembers the steps of the last seconds; a listener of a `StepTimer`."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._steps: deque[StepTimes] = deque()

    def __call__(self, times: StepTimes) -> None:
        """Remember a step."""
        self._steps.append(times)
        self._forget()

    def summary(self) -> Summary:
        """The present moment's."""
        self._forget()
        watched = min(WINDOW, time.monotonic() - self._since)
        told = [times for times in self._steps if times.spans]
        exchanging = sum(times.exchanging() for times in told)
        whole = sum(times.end - times.start for times in told)
        seen = watched > 0 and len(told) >= _TOLD * len(self._steps)
        return Summary(
            watched,
            len(self._steps),
            sum(times.rows for times in self._steps),
            (whole - exchanging) / watched if seen else None,
            exchanging / watched if seen else None,
        )

    def _forget(self) -> None:
        oldest = time.monotonic() - WINDOW
        while self._steps and self._steps[0].end < oldest:
            self._steps.popleft()
