"""Lanes on an A rank: what may be used again while steps of several lanes are under way.

With one stream whatever is launched later runs later, so memory that was freed can be handed out at
once.  Each lane has a stream of its own, so a step that was launched before the free may still
write there: a finished request's extra step, for one.  Freed memory therefore waits in a
`Quarantine` until every step launched before the free has ended.

On the CPU a step has ended when its launch returns, so nothing ever waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class StepEvent(Protocol):
    """The end of a launched step, as PyTorch's device events tell it; ``torch.cpu``'s is past."""

    def query(self) -> bool:
        """Whether the step has ended."""

    def synchronize(self) -> None:
        """Return once the step has ended."""

    def wait(self, stream: Any = None) -> None:
        """Let what is submitted to `stream` (None: the current one) from now on run after it."""


class StepEnd:
    """The end of a launched step; where its sampling is launched later, the end of that.

    Until it is recorded the step has not ended, whatever the device has done.
    """

    def __init__(self, event: Any) -> None:
        """`event`: PyTorch's, new."""
        self._event = event
        self.recorded = False

    def record(self, stream: Any) -> None:
        """All of the step has been submitted to `stream`."""
        self._event.record(stream)
        self.recorded = True

    def query(self) -> bool:
        """See `StepEvent`."""
        return self.recorded and self._event.query()

    def synchronize(self) -> None:
        """See `StepEvent`; only once it is recorded."""
        assert self.recorded
        self._event.synchronize()

    def wait(self, stream: Any = None) -> None:
        """See `StepEvent`; only once it is recorded."""
        assert self.recorded
        self._event.wait(stream)


class StepsInFlight:
    """The steps that this rank has launched and that may not have ended yet."""

    def __init__(self) -> None:
        self._last: dict[int, StepEvent] = {}

    def launched(self, lane: int, event: StepEvent) -> None:
        """`lane` has launched a step; the steps of one lane end in the order of their launch."""
        self._last[lane] = event

    def pending(self, *, but: int | None = None) -> tuple[StepEvent, ...]:
        """The last step of each lane (of all but one) that has not ended."""
        return tuple(
            event for lane, event in self._last.items() if lane != but and not event.query()
        )


class _Held(NamedTuple):
    size: int
    give_back: Callable[[], None]
    steps: tuple[StepEvent, ...]


class Quarantine:
    """Memory of one pool that was freed while steps launched before were under way."""

    def __init__(self, steps: StepsInFlight) -> None:
        self._steps = steps
        self._held: deque[_Held] = deque()

    @property
    def size(self) -> int:
        """How much is held, in the pool's units."""
        return sum(held.size for held in self._held)

    def free(self, size: int, give_back: Callable[[], None]) -> None:
        """Call `give_back`, which returns `size` units to the pool, once no step may write there.

        At once, if none is under way.
        """
        steps = self._steps.pending()
        if not steps:
            self.give_back_ended()
            give_back()
            return
        self._held.append(_Held(size, give_back, steps))

    def give_back_ended(self) -> None:
        """Return what no step may write to any more."""
        while self._held and all(step.query() for step in self._held[0].steps):
            self._held.popleft().give_back()

    def give_back_all(self) -> None:
        """Return everything: what is submitted from now on runs after the steps in question."""
        while self._held:
            held = self._held.popleft()
            for step in held.steps:
                step.wait()
            held.give_back()

    def clear(self) -> None:
        """Forget what is held: the pool has been filled anew."""
        self._held.clear()


def spread(joining: int, sizes: Sequence[int]) -> list[int]:
    """Which lane each of `joining` requests goes to: the one with the fewest, the first of equals.

    Args:
        sizes: requests that each lane has.
    """
    sizes = list(sizes)
    chosen = []
    for _ in range(joining):
        lane = min(range(len(sizes)), key=sizes.__getitem__)
        sizes[lane] += 1
        chosen.append(lane)
    return chosen
