"""The F side of a step, over a transport that only records: layers and rounds in A's order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.dispatch.step_plan import Caps, Round, StepKind, StepPlan
from sglang_afd.dispatch.transport import MaskedBatch, RowBatch
from sglang_afd.ffn.serve import Experts, serve_eagerly
from sglang_afd.observe.stages import HostClock, Stage, StepTimer

pytestmark = pytest.mark.unit


class Recorder:
    """Hands out batches that are told apart by their values; records all calls."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.replies: list[tuple[int, float]] = []  # (round it answers, value sent back)

    def receive(self, round_: Round) -> tuple[RowBatch, int]:
        assert len(self.replies) == len(self.rounds), "a round began before the last was answered"
        index = len(self.rounds)
        self.rounds.append(round_)
        hidden = torch.full((max(1, sum(round_.counts)), 2), float(index))
        return RowBatch(hidden, torch.zeros(1, 1), torch.zeros(1, 1)), index

    def reply(self, output: torch.Tensor, handle: int) -> None:
        self.replies.append((handle, output[0, 0].item()))


def layer(number: int) -> Experts:
    def experts(batch: RowBatch | MaskedBatch) -> torch.Tensor:
        return batch.hidden + 1000 * number

    return experts


@given(st.lists(st.integers(0, 25), min_size=1, max_size=4), st.integers(1, 8), st.integers(0, 5))
def test_every_round_of_every_layer_is_answered_in_order(
    rows: list[int], cap: int, layers: int
) -> None:
    kinds = [StepKind.EXTEND if index % 2 else StepKind.DECODE for index in range(len(rows) + 1)]
    plan = StepPlan(0, tuple(kinds), (*rows, 0), Caps(cap, 2 * cap))
    transport = Recorder()
    timer = StepTimer(Stage.EXPERTS, HostClock, rank=None, experts=1)
    layered = [layer(number) for number in range(layers)]
    serve_eagerly(plan, layers=layered, transport=transport, timer=timer)
    rounds = list(plan.rounds)
    assert transport.rounds == rounds * layers
    assert transport.replies == [
        (index, index + 1000 * (index // len(rounds))) for index in range(layers * len(rounds))
    ]
