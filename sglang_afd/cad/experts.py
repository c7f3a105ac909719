"""Experts that several model ranks share: each has its slice, and serves all of them.

The exchange is AFD's (`sglang_afd.dispatch.gloo`), between ranks that are both of its sides: every
model rank takes part in every layer of a step, also without rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_afd.context import RankContext
from sglang_afd.dispatch.gloo import GlooTransport
from sglang_afd.dispatch.transport import RoutedRows, RowBatch
from sglang_afd.observe.stages import Stage


class SharedExperts:
    """All MoE layers of one model rank share one; it follows the step plan."""

    def __init__(self, context: RankContext, transport: GlooTransport) -> None:
        self._context, self._transport = context, transport

    def __call__(self, rows: RoutedRows, run: Callable[[RowBatch], torch.Tensor]) -> torch.Tensor:
        """Run one MoE layer.

        Args:
            rows: of this rank, with global expert ids.
            run: this rank's experts, as `Transport.reply` takes their output.

        Returns:
            [n, H], each row the weighted sum of its experts' outputs; zeros while the rank starts.

        Raises:
            RuntimeError: outside of a step, or the rows are not as many as the plan says.
        """
        context, plan = self._context, self._context.plan
        if plan is None:
            if context.serving:
                raise RuntimeError(
                    f"{context.name} ran a MoE layer outside of an agreed step; its experts' "
                    f"outputs would be missing"
                )
            return torch.zeros_like(rows.hidden)
        if len(rows.hidden) != plan.rows[context.rank]:
            raise RuntimeError(
                f"{context.name} announced {plan.rows[context.rank]} rows for step "
                f"{plan.step_id}, but a MoE layer got {len(rows.hidden)}"
            )
        [round_] = plan.rounds
        with context.timer.stage(Stage.DISPATCH):
            sent = self._transport.dispatch(rows, round_)
            batch, handle = self._transport.receive(round_)
        output = run(batch)
        with context.timer.stage(Stage.COMBINE):
            self._transport.reply(output, handle)
            combined = self._transport.combine(sent)
            self._transport.settle()
        return combined
