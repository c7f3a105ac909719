"""Which work goes to which stream, and when one is waited for: CUDA's calls only noted down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from sglang_afd.attention.empty_rounds import EmptyRounds
from sglang_afd.dispatch.step_plan import Caps, Round, StepKind, StepPlan
from sglang_afd.dispatch.transport import MaskedBatch, RoutedRows, RowBatch, nothing
from sglang_afd.dispatch.turns import NoTurns
from sglang_afd.ffn.graph import GraphServer
from sglang_afd.observe.stages import HostClock, Stage, StepTimer

pytestmark = pytest.mark.unit

TIMER = StepTimer(Stage.EXPERTS, HostClock, rank=None, experts=1)  # nobody listens

NOTHING = torch.empty(0, 1)
LAYERS = 2


class Cuda:
    """Stands in for `torch.cuda`: notes on which stream things happen."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.on = "current"
        cuda = self

        class Stream:
            def __init__(self, priority: int = 0) -> None:
                self.name = "own" if priority else "SGLang's"

            def wait_stream(self, other: Stream) -> None:
                cuda.notes.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                cuda.note("replay")

        @contextmanager
        def use(stream: Stream) -> Iterator[None]:
            before, cuda.on = cuda.on, stream.name
            yield
            cuda.on = before

        @contextmanager
        def record(graph: Graph, stream: Stream) -> Iterator[None]:
            with use(stream):
                yield
            cuda.note("recorded")

        current = Stream()
        current.name = "current"
        for name, stand_in in (
            ("Stream", Stream),
            ("CUDAGraph", Graph),
            ("stream", use),
            ("graph", record),
            ("current_stream", lambda: current),
        ):
            patch.setattr(torch.cuda, name, stand_in)

    def note(self, what: str) -> None:
        self.notes.append(f"{self.on}: {what}")

    def taken(self) -> list[str]:
        taken, self.notes = self.notes, []
        return taken


class Transport:
    """Notes every exchange's path and first row."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def receive(self, round_: Round) -> tuple[RowBatch, Round]:
        return RowBatch(NOTHING, NOTHING, NOTHING), round_

    def reply(self, output: torch.Tensor, round_: Round) -> None:
        self.cuda.note(f"{round_.path.name} {round_.start}")

    def dispatch(
        self, rows: RoutedRows, round_: Round, own_sent: Callable[[], None] = nothing
    ) -> Round:
        own_sent()
        return round_

    def combine(self, round_: Round) -> torch.Tensor:
        self.cuda.note(f"{round_.path.name} {round_.start}")
        return NOTHING


def experts(batch: RowBatch | MaskedBatch) -> torch.Tensor:
    return batch.hidden


def plan(decode: int, extend: int) -> StepPlan:
    kinds = (StepKind.DECODE, StepKind.EXTEND, StepKind.IDLE)
    return StepPlan(0, kinds, (decode, extend, 0), Caps(4, 8))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_ffn_ranks_replay_one_round_and_serve_all_else_eagerly(cuda: Cuda) -> None:
    """Decode on its own stream, so that no block of a prefill is in its way."""
    server = GraphServer([experts] * LAYERS, Transport(cuda), TIMER, lanes=1, turns=NoTurns())
    assert cuda.taken() == ["own: DECODE 0"] * LAYERS + ["current: recorded"]
    for step, wanted in (
        (plan(4, 0), ["own: replay"]),
        (plan(5, 0), ["own: DECODE 0", "own: DECODE 4"] * LAYERS),
        (plan(0, 9), ["current: BULK 0", "current: BULK 8"] * LAYERS),
        (plan(1, 3), ["own: replay"] + ["current: BULK 0"] * LAYERS),
        (plan(0, 0), []),
    ):
        server.serve(step)
        assert cuda.taken() == wanted, step


def test_rounds_without_rows_are_between_what_comes_before_and_after_the_forward(
    cuda: Cuda,
) -> None:
    """A rank's exchanges of one path count on: their order must be the same on all streams."""
    empty = EmptyRounds(Transport(cuda), LAYERS, RoutedRows(NOTHING, NOTHING, NOTHING), 0)
    assert cuda.taken() == ["own: DECODE 0"] * LAYERS + ["current: recorded"]
    empty.start(2)
    assert cuda.taken() == ["own waits for current", "own: replay", "own: replay"]
    empty.finish()
    assert cuda.taken() == ["current waits for own"]
