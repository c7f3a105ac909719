"""The F side of rounds: for every MoE layer, take rows, run the experts, send rows back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_afd.dispatch.step_plan import Round, StepPlan
from sglang_afd.dispatch.transport import MaskedBatch, RowBatch, Transport
from sglang_afd.observe.stages import Stage, StepTimer

Experts = Callable[[RowBatch | MaskedBatch], torch.Tensor]
"""One layer's experts of this rank: a received batch -> output as `Transport.reply` takes it."""


def serve_eagerly(
    plan: StepPlan, *, layers: Sequence[Experts], transport: Transport, timer: StepTimer
) -> None:
    """Serve one forward of the A ranks in the plan's rounds."""
    with timer.step(plan, plan.rounds):
        serve_rounds(plan.rounds, layers, transport, timer)


def serve_rounds(
    rounds: Sequence[Round], layers: Sequence[Experts], transport: Transport, timer: StepTimer
) -> None:
    """Serve rounds of one forward of the A ranks: in every layer, in order."""
    for experts in layers:
        for round_ in rounds:
            with timer.stage(Stage.RECEIVE):
                batch, handle = transport.receive(round_)
            timer.received(batch)
            output = experts(batch)
            with timer.stage(Stage.REPLY):
                transport.reply(output, handle)
