"""The F side of a step: for every MoE layer, take rows, run the experts, send rows back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_afd.dispatch.step_plan import StepPlan
from sglang_afd.dispatch.transport import MaskedBatch, RowBatch, Transport

Experts = Callable[[RowBatch | MaskedBatch], torch.Tensor]
"""One layer's experts of this rank: a received batch -> output as `Transport.reply` takes it."""


def serve_step(plan: StepPlan, layers: Sequence[Experts], transport: Transport) -> None:
    """Serve one forward of the A ranks: every layer, in order, in the plan's rounds."""
    for experts in layers:
        for round_ in plan.rounds:
            batch, handle = transport.receive(round_)
            transport.reply(experts(batch), handle)
