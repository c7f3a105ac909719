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
            [n, H], each row the weighted sum of its experts' outputs.  In a warm-up forward (no
            step agreed, nothing on the other side) zeros, and nothing is sent.

        Raises:
            RuntimeError: the rows are not as many as the step plan announced.
        """
        plan, rank = self._plan, self._context.rank
        if plan is None:
            return torch.zeros_like(hidden)
        if hidden.shape[0] != plan.rows[rank]:
            raise RuntimeError(
                f"{self._context.name} announced {plan.rows[rank]} rows for step {plan.step_id}, "
                f"but a MoE layer got {hidden.shape[0]}"
            )
        self._layers_left -= 1
        parts = []
        for index in range(plan.slices):
            start, stop = plan.bounds(rank, index)
            rows = RoutedRows(hidden[start:stop], expert_ids[start:stop], weights[start:stop])
            parts.append(self._transport.combine(self._transport.dispatch(rows)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
