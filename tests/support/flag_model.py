"""A model of the exchange's flags at small sizes, and a search through all that can happen in it.

Every rank runs a stream a lane.  A stream on an A rank repeats: send rows and flags, wait for the F
ranks' flags, sum the replies; on an F rank: wait for the A ranks' flags, run the experts (reads
rows), return (reads ids, writes replies and flags).  Between any two of these steps, anything else
may happen, in any order:

* What a rank writes into a peer becomes visible there at any later time, row and flag each by
  itself; a flag after the rows that it releases.
* A kernel begins when its stream has come to it, everything before it in its launch queue has
  begun, and its GPU has room.  A wait holds its slots until it has seen its flags.  The others
  need no one to end, so each is one step: what they hold can only delay, and all orders are tried.

Every step moves a counter up, so no run is endless, and one that cannot end stops in a state with
no next one: a deadlock.  Lanes that differ in nothing are interchangeable, and searched once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

SEND, WAIT_A, WAITING_A, SUM = range(4)
WAIT_F, WAITING_F, EXPERTS, RETURN = range(4)
STEPS = 4  # of an exchange, on either role: its program's steps above, over and over

Lane = tuple[int, ...]
"""Steps done by each A and F rank; then for each pair of ranks what is visible: see `_pair`."""
State = tuple[int, ...]
"""A lane's number for each lane: see `_Search`."""


@dataclass(frozen=True)
class Model:
    """Sizes, and what the negative controls change."""

    attention: int
    ffn: int
    lanes: int
    exchanges: int
    slots: int = 16
    """Of a GPU; a wait takes `wait_slots`, another kernel all that one wait a lane leaves."""
    wait_slots: int = 1
    awaited: int | None = None
    """F ranks, the first ones, whose flags A ranks wait for and whose replies they read."""
    released: bool = True
    """A flag is visible only after the rows written before it."""
    shared: bool = False
    """All lanes use the same rows and replies."""
    queues: int = 16
    """Launch queues of a GPU; lane l is in queue l modulo them."""
    order_a: tuple[int, ...] = ()
    order_f: tuple[int, ...] = ()
    """In which order the hosts launch an exchange of the lanes; by number by default."""
    absent: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    """(A rank, exchange from 0): the rank leaves it out."""
    told: bool = True
    """F ranks know of `absent`."""

    @property
    def ranks(self) -> int:
        return self.attention + self.ffn

    @property
    def alike(self) -> bool:
        """Lanes are interchangeable, each with a launch queue of its own."""
        return self.queues >= self.lanes

    @cached_property
    def own(self) -> list[int]:
        """Exchanges of each A rank."""
        return [
            sum((rank, number) not in self.absent for number in range(self.exchanges))
            for rank in range(self.attention)
        ]

    @cached_property
    def served(self) -> list[list[int]]:
        """[A rank][n]: how many of its exchanges are, to the F ranks, among their first n."""
        return [
            list(
                accumulate(
                    (
                        int(not self.told or (rank, number) not in self.absent)
                        for number in range(self.exchanges)
                    ),
                    initial=0,
                )
            )
            for rank in range(self.attention)
        ]

    @cached_property
    def length(self) -> list[int]:
        """Steps of each rank's stream."""
        return [STEPS * n for n in self.own] + [STEPS * self.exchanges] * self.ffn

    @property
    def heard(self) -> range:
        """F ranks that A ranks wait for."""
        return range(self.ffn if self.awaited is None else self.awaited)


class Found(NamedTuple):
    """A fault, and the shortest way to it."""

    fault: str
    steps: list[str]


class Outcome(NamedTuple):
    """What a search saw."""

    found: Found | None
    states: int


class _Move(NamedTuple):
    """A step of one lane, as far as that lane decides."""

    name: str
    after: Lane
    fault: str | None = None
    rank: int | None = None
    """Where a kernel begins, None = none does."""
    needs: int = 0
    """Slots."""
    into: int | None = None
    """Pair's index whose row or reply (`RETURN` steps) is written."""


ROW, FLAG, REPLY, ANSWER = range(4)
"""Of a pair of ranks: writes that are visible to the reader, counted."""


def _pair(model: Model, a: int, f: int) -> int:
    """Where a lane keeps the counts of A rank a and F rank f."""
    return model.ranks + 4 * (a * model.ffn + f)


def _plus(lane: Lane, index: int) -> Lane:
    return (*lane[:index], lane[index] + 1, *lane[index + 1 :])


def _unread(model: Model, lane: Lane, a: int, f: int, what: int) -> bool:
    """The row or reply that is visible is still to be read."""
    visible = lane[_pair(model, a, f) + what]
    if what == ROW:
        return visible > model.served[a][lane[model.attention + f] // STEPS]
    return visible > lane[a] // STEPS and f in model.heard


def _deliveries(model: Model, lane: Lane) -> Iterator[_Move]:
    """Writes on their way that may become visible now."""
    for a in range(model.attention):
        for f in range(model.ffn):
            base = _pair(model, a, f)
            sent = (lane[a] + STEPS - 1 - SEND) // STEPS
            returned = model.served[a][lane[model.attention + f] // STEPS]
            for what, written in ((ROW, sent), (REPLY, returned)):
                name = f"{'row' if what == ROW else 'reply'} A{a}{'>' if what == ROW else '<'}F{f}"
                if lane[base + what] < written:
                    fault = "overwritten" if _unread(model, lane, a, f, what) else None
                    yield _Move(name, _plus(lane, base + what), fault, into=base + what)
                ahead = lane[base + what] if model.released else written
                if lane[base + what + 1] < min(ahead, written):
                    yield _Move("flag of " + name, _plus(lane, base + what + 1))


def _attention_moves(model: Model, lane: Lane) -> Iterator[_Move]:
    for a in range(model.attention):
        number, step = divmod(lane[a], STEPS)
        if number == model.own[a]:
            continue
        needs = model.wait_slots if step == WAIT_A else model.slots - model.lanes
        name, after = f"A{a} {('send', 'wait', 'seen', 'sum')[step]}", _plus(lane, a)
        pairs = [_pair(model, a, f) for f in model.heard]
        if step != WAITING_A:
            stale = step == SUM and any(lane[pair + REPLY] != number + 1 for pair in pairs)
            yield _Move(name, after, "stale read" if stale else None, a, needs)
        elif all(lane[pair + ANSWER] > number for pair in pairs):
            yield _Move(name, after)


def _ffn_moves(model: Model, lane: Lane) -> Iterator[_Move]:
    for f in range(model.ffn):
        rank = model.attention + f
        number, step = divmod(lane[rank], STEPS)
        if number == model.exchanges:
            continue
        needs = model.wait_slots if step == WAIT_F else model.slots - model.lanes
        name, after = f"F{f} {('wait', 'seen', 'experts', 'return')[step]}", _plus(lane, rank)
        sources = {
            _pair(model, a, f): served[number + 1]
            for a, served in enumerate(model.served)
            if served[number + 1] > served[number]
        }
        if step != WAITING_F:
            reads = step in (EXPERTS, RETURN)
            stale = reads and any(lane[pair + ROW] != n for pair, n in sources.items())
            yield _Move(name, after, "stale read" if stale else None, rank, needs)
        elif all(lane[pair + FLAG] >= n for pair, n in sources.items()):
            yield _Move(name, after)


class _Search:
    """The search of one model.  Lanes are numbered as they are met: numbers hash and sort fast."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.lanes: list[Lane] = []
        self._numbers: dict[Lane, int] = {}
        self._moves: dict[int, list[tuple[_Move, int]]] = {}
        self.came: dict[State, tuple[State, int, str] | None] = {}

    def number(self, lane: Lane) -> int:
        if lane not in self._numbers:
            self._numbers[lane] = len(self.lanes)
            self.lanes.append(lane)
        return self._numbers[lane]

    def moves(self, number: int) -> list[tuple[_Move, int]]:
        """The moves of the lane with that number, and the number of the lane after each."""
        if number not in self._moves:
            lane = self.lanes[number]
            ways = (_deliveries, _attention_moves, _ffn_moves)
            moves = [move for way in ways for move in way(self.model, lane)]
            self._moves[number] = [(move, self.number(move.after)) for move in moves]
        return self._moves[number]

    def possible(self, state: State, index: int, move: _Move) -> bool:
        """What the other lanes do leaves room for the move, and its launch queue has come to it."""
        if move.rank is None:
            return True
        if _held(self.model, [self.lanes[n] for n in state], move.rank) > (
            self.model.slots - move.needs
        ):
            return False
        return _launched(self.model, [self.lanes[n] for n in state], index, move.rank)

    def fault(self, state: State, index: int, move: _Move) -> str | None:
        if move.fault or not self.model.shared or move.into is None:
            return move.fault
        # the buffers are shared: the write falls on what other lanes may still have to read
        pair, what = divmod(move.into - self.model.ranks, 4)
        a, f = divmod(pair, self.model.ffn)
        others = [self.lanes[n] for other, n in enumerate(state) if other != index]
        return "overwritten" if any(_unread(self.model, o, a, f, what) for o in others) else None

    def ended(self, state: State) -> bool:
        ranks, length = self.model.ranks, self.model.length
        return all(list(self.lanes[n][:ranks]) == length for n in state)

    def way(self, state: State) -> list[str]:
        """The steps that led to a state; interchangeable lanes change their numbers on the way."""
        steps = []
        while (before := self.came[state]) is not None:
            state, index, name = before
            steps.append(f"lane {index}: {name}")
        return steps[::-1]

    def run(self, limit: int) -> Outcome:
        empty = (0,) * (self.model.ranks + 4 * self.model.attention * self.model.ffn)
        first: State = (self.number(empty),) * self.model.lanes
        self.came[first] = None
        layer = [first]
        while layer:
            following = []
            for state in layer:
                stuck = True
                for index, lane in enumerate(state):
                    for move, after in self.moves(lane):
                        if not self.possible(state, index, move):
                            continue
                        stuck = False
                        if fault := self.fault(state, index, move):
                            steps = [*self.way(state), f"lane {index}: {move.name}"]
                            return Outcome(Found(fault, steps), len(self.came))
                        lanes = (*state[:index], after, *state[index + 1 :])
                        if self.model.alike:
                            lanes = tuple(sorted(lanes))
                        if lanes not in self.came:
                            self.came[lanes] = state, index, move.name
                            following.append(lanes)
                if stuck and not self.ended(state):
                    return Outcome(Found("deadlock", self.way(state)), len(self.came))
                if len(self.came) > limit:
                    raise MemoryError(f"more than {limit} states in {self.model}")
            layer = following
        return Outcome(None, len(self.came))


def _held(model: Model, lanes: list[Lane], rank: int) -> int:
    """Slots that waits hold on a rank's GPU."""
    waiting = WAITING_A if rank < model.attention else WAITING_F
    return model.wait_slots * sum(lane[rank] % STEPS == waiting for lane in lanes)


def _launched(model: Model, lanes: list[Lane], index: int, rank: int) -> bool:
    """Everything before the next kernel of lane `index` in its launch queue has begun."""
    if model.alike:
        return True
    number = lanes[index][rank] // STEPS
    order = (model.order_a if rank < model.attention else model.order_f) or range(model.lanes)
    queue = [lane for lane in order if lane % model.queues == index % model.queues]
    before = queue[: queue.index(index)]
    return all(lanes[lane][rank] >= STEPS * (number + (lane in before)) for lane in queue)


def search(model: Model, limit: int = 1_000_000) -> Outcome:
    """Look at every state that can be reached, breadth first, until one shows a fault.

    Faults: ``stale read`` (a row or reply of another exchange is read), ``overwritten`` (one that
    is still to be read), ``deadlock``.

    Raises:
        MemoryError: there are more than `limit` states.
    """
    return _Search(model).run(limit)
