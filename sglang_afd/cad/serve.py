"""The attention side of a step: for every layer, take q, k and v, store, attend, send o back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sglang_afd.cad.form import Form
from sglang_afd.cad.tables import HEADER, StepTables
from sglang_afd.context import RankContext
from sglang_afd.dispatch.messages import Messages
from sglang_afd.dispatch.step_plan import StepPlan
from sglang_afd.dispatch.transport import ExchangeError
from sglang_afd.observe.stages import Stage


class Layer(NamedTuple):
    """One attention layer of this rank's heads."""

    form: Form
    """What this rank gets and gives."""
    attend: Callable[..., torch.Tensor]
    """(batch, *inputs [n, width]) -> [n, output]; stores keys and values first."""


class AttentionServer:
    """Serves the steps of all model ranks, one after another in every layer."""

    def __init__(
        self,
        context: RankContext,
        messages: Messages,
        layers: Sequence[Layer],
        begin: Callable[[dict[int, StepTables]], dict[int, Any]],
        dtype: torch.dtype,
    ) -> None:
        """Make it; nothing is sent.

        Args:
            begin: the step's tables, by the model rank's world rank -> what `Layer.attend` needs.
            dtype: of the rows.
        """
        self._context, self._messages, self._dtype = context, messages, dtype
        self._layers, self._begin = tuple(layers), begin

    def serve(self, plan: StepPlan) -> None:
        """Serve one forward of the model ranks.

        Raises:
            ExchangeError: a model rank is lost, or tells of another step than it has announced.
        """
        timer = self._context.timer
        peers = [rank for rank in self._context.topology.leading_world if plan.rows[rank]]
        with timer.step(plan, plan.rounds):
            with timer.stage(Stage.RECEIVE):
                tables = {peer: self._tables(plan, peer) for peer in peers}
            batches = self._begin(tables)
            for layer in self._layers:
                for peer in peers:
                    self._serve(layer, peer, plan.rows[peer], batches[peer])

    def _tables(self, plan: StepPlan, peer: int) -> StepTables:
        header, doing = torch.empty(HEADER, dtype=torch.int64), "waiting for the step of"
        self._messages.receive(header, peer, doing)
        try:
            body = StepTables.body(header)
        except ValueError as error:
            raise self._unexpected(plan, peer, str(error)) from error
        self._messages.receive(body, peer, doing)
        tables = StepTables.unpack(header, body)
        if len(tables.slots) != plan.rows[peer]:
            raise self._unexpected(plan, peer, f"{len(tables.slots)} rows")
        return tables

    def _unexpected(self, plan: StepPlan, peer: int, what: str) -> ExchangeError:
        return ExchangeError(
            f"{self._context.name} was told of {what} by {self._context.topology.name_of(peer)}, "
            f"which announced {plan.rows[peer]} rows for step {plan.step_id}; restart the "
            f"deployment"
        )

    def _serve(self, layer: Layer, peer: int, count: int, batch: Any) -> None:
        timer = self._context.timer
        with timer.stage(Stage.RECEIVE):
            rows = torch.empty(count, sum(layer.form.inputs), dtype=self._dtype)
            self._messages.receive(rows, peer)
        output = layer.attend(batch, *rows.split(layer.form.inputs, dim=1))
        with timer.stage(Stage.REPLY):
            sending = self._messages.send(output.cpu(), peer, "returning rows to")
            self._messages.wait(sending, "returning rows to")
