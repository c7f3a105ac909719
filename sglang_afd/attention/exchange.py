"""The A side of a MoE layer: send routed rows to F, take the combined rows back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from sglang_afd.attention.empty_rounds import EmptyRounds
from sglang_afd.context import RankContext
from sglang_afd.dispatch.step_plan import Path, Round, StepPlan, recorded
from sglang_afd.dispatch.transport import RoutedRows, Transport, nothing
from sglang_afd.dispatch.turns import NoTurns, Turns
from sglang_afd.observe.stages import Stage


class AttentionExchange:
    """All MoE layers of one A rank share one exchange; it follows the step plan."""

    def __init__(self, context: RankContext, transport: Transport) -> None:
        self._context, self._transport = context, transport
        self._empty_rounds: Sequence[EmptyRounds] = ()
        self._turns: Turns = NoTurns()
        self._recorded_layers = 0
        self._plan: StepPlan | None = None
        self._rounds: tuple[Round, ...] = ()
        self._layers_left = 0

    def use(self, empty_rounds: Sequence[EmptyRounds]) -> None:
        """From now on decode rounds without rows of this rank's go their own way, by lane."""
        self._empty_rounds = empty_rounds

    def take_turns(self, turns: Turns) -> None:
        """What graphs record from now on lies in turns of its lane, from exchange to exchange."""
        self._turns = turns

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
                with nullcontext() if plan is None else self._rounds_of(plan):
                    yield
            finally:
                self._plan = None
        if plan is not None and self._layers_left:
            raise RuntimeError(
                f"{self._context.name} left out {self._layers_left} of "
                f"{len(self._context.facts.layers)} MoE layers in step {plan.step_id}; F ranks "
                f"still wait for them"
            )

    @contextmanager
    def _rounds_of(self, plan: StepPlan) -> Iterator[None]:
        """Settle which rounds the forward's layers go through, and start those that none does."""
        rank, decode = self._context.rank, plan.rounds_of(Path.DECODE)
        empty = None
        self._rounds = plan.rounds
        if self._empty_rounds and decode and not plan.rows_of(Path.DECODE, rank):
            empty = self._empty_rounds[plan.lane]
            self._rounds = plan.rounds_of(Path.BULK)
            empty.start(len(decode))
        joined = tuple(round_ for round_ in self._rounds if round_.joins(rank))
        with self._context.timer.step(plan, joined):
            yield
        if empty is not None:
            empty.finish()

    def skips(self) -> bool:
        """Take part in a step in which this rank has no rows, if that needs no forward.

        Returns:
            whether it did; if not, the model must run.
        """
        plan = self._context.plan
        if not self._empty_rounds or plan is None or plan.rows[self._context.rank]:
            return False
        with self.step():
            self._layers_left = 0
        return True

    def replayed(self) -> None:
        """The forward is a replay of a recorded one, which went through all layers.

        Raises:
            RuntimeError: the plan is not the one round that was recorded.
        """
        plan = self._plan
        if plan is not None and (rounds := len(plan.rounds_of(Path.DECODE))) != 1:
            raise RuntimeError(
                f"{self._context.name} replayed a graph of one round, but step {plan.step_id} has "
                f"{rounds}; F ranks still wait for it"
            )
        self._layers_left = 0

    def _recorded(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        caps = self._context.caps
        if caps is not None and hidden.shape[0] > caps.decode:
            raise RuntimeError(
                f"{self._context.name} records a graph of {hidden.shape[0]} rows, over the "
                f"{caps.decode} of one exchange (--afd-max-tokens-per-rank); raise it, or lower "
                f"--cuda-graph-max-bs-decode and --cuda-graph-bs-decode"
            )
        rows = RoutedRows(hidden, expert_ids, weights)
        layers = len(self._context.facts.layers)
        layer = self._recorded_layers % layers
        self._recorded_layers += 1
        end_turn = self._turns.end if layer else nothing
        sent = self._transport.dispatch(rows, recorded(self._context.lane), end_turn)
        combined = self._transport.combine(sent)
        if layer < layers - 1:
            self._turns.take()
        return combined

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
            step agreed, nothing on the other side) zeros, and nothing is sent; the exchange is
            only recorded where a CUDA graph is.

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
            if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
                return self._recorded(hidden, expert_ids, weights)
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
        parts, timer = [hidden[:0]], self._context.timer
        for round_ in self._rounds:
            if round_.joins(rank):
                mine = round_.rows_of(rank)
                rows = RoutedRows(hidden[mine], expert_ids[mine], weights[mine])
                with timer.stage(Stage.DISPATCH):
                    sent = self._transport.dispatch(rows, round_)
                with timer.stage(Stage.COMBINE):
                    parts.append(self._transport.combine(sent))
        return parts[-1] if len(parts) == 2 else torch.cat(parts)
