"""The A side of a MoE layer: send routed rows to F, take the combined rows back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sglang_afd.context import RankContext
from sglang_afd.dispatch.step_plan import StepPlan
from sglang_afd.dispatch.transport import RoutedRows, Transport


class AttentionExchange:
    """All MoE layers of one A rank share one exchange; it follows the step plan."""

    def __init__(self, context: RankContext, transport: Transport) -> None:
        self._context, self._transport = context, transport
        self._plan: StepPlan | None = None
        self._layers_left = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """The exchanges of one forward of the model.

        Raises:
            RuntimeError: the forward did not exchange once for every MoE layer; F would still wait.
        """
        with self._context.step() as plan:
            self._plan = plan
            self._layers_left = len(self._context.facts.layers)
            try:
                yield
            finally:
                self._plan = None
        if plan is not None and self._layers_left:
            raise RuntimeError(
                f"{self._context.name} left out {self._layers_left} of "
                f"{len(self._context.facts.layers)} MoE layers in step {plan.step_id}; F ranks "
                f"still wait for them"
            )

    def __call__(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Run one MoE layer's experts on F.

        Args:
            hidden: [n, H] rows.
            expert_ids: [n, K] global expert ids; negative places are empty.
            weights: [n, K] the router's weights.

        Returns:
            [n, H], each row the weighted sum of its experts' outputs.  While the rank starts (no
            step agreed, nothing on the other side) zeros, and nothing is sent.

        Raises:
            RuntimeError: outside of a step, or the rows or layers are not as many as the step plan
                and the model announced.
        """
        plan, rank, name = self._plan, self._context.rank, self._context.name
        if plan is None:
            if self._context.serving:
                raise RuntimeError(
                    f"{name} ran a MoE layer outside of an agreed step; its experts' outputs would "
                    f"be missing"
                )
            return torch.zeros_like(hidden)
        if not self._layers_left:
            raise RuntimeError(
                f"{name} ran more than {len(self._context.facts.layers)} MoE layers in step "
                f"{plan.step_id}; F ranks serve no more"
            )
        if hidden.shape[0] != plan.rows[rank]:
            raise RuntimeError(
                f"{name} announced {plan.rows[rank]} rows for step {plan.step_id}, but a MoE layer "
                f"got {hidden.shape[0]}"
            )
        self._layers_left -= 1
        parts = [hidden[:0]]
        for round_ in plan.rounds:
            if round_.joins(rank):
                mine = round_.rows_of(rank)
                rows = RoutedRows(hidden[mine], expert_ids[mine], weights[mine])
                parts.append(self._transport.combine(self._transport.dispatch(rows, round_)))
        return parts[-1] if len(parts) == 2 else torch.cat(parts)
