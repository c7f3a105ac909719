"""The model side of an attention layer: send q, k and v to the attention ranks, take o back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_afd.cad.form import Form, scatter
from sglang_afd.cad.tables import StepTables
from sglang_afd.context import RankContext
from sglang_afd.dispatch.messages import Messages
from sglang_afd.dispatch.step_plan import StepPlan
from sglang_afd.observe.stages import Stage


class RemoteAttention:
    """All attention layers of one model rank share one; it follows the step plan."""

    def __init__(self, context: RankContext, messages: Messages, forms: Sequence[Form]) -> None:
        """`forms`: of every attention layer, in the order in which the model runs them."""
        self._context, self._messages, self._forms = context, messages, tuple(forms)
        self._plan: StepPlan | None = None
        self._announced = False
        self._done = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """The exchanges of one forward of the model.

        Raises:
            RuntimeError: the forward left layers out; attention ranks would still wait.
        """
        with self._context.step() as plan:
            self._plan, self._announced, self._done = plan, False, 0
            try:
                if plan is None:
                    yield
                else:
                    with self._context.timer.step(plan, plan.rounds):
                        yield
            finally:
                self._plan = None
        if plan is not None and self._done < len(self._forms):
            raise RuntimeError(
                f"{self._context.name} left out {len(self._forms) - self._done} of "
                f"{len(self._forms)} attention layers in step {plan.step_id}; attention ranks "
                f"still wait for them"
            )

    def idle(self) -> bool:
        """Whether this rank has no rows in the step that was agreed on: nothing is sent then."""
        plan = self._context.plan
        return plan is not None and not plan.rows[self._context.rank]

    def announce(self, tables: StepTables) -> None:
        """Tell the attention ranks of the step's requests, before its first layer.

        Raises:
            RuntimeError: it has been told before, or has other rows than the plan says.
        """
        plan = self._plan
        if plan is None:
            return  # a warm-up forward
        planned = plan.rows[self._context.rank]
        if self._announced or len(tables.slots) != planned:
            raise RuntimeError(
                f"{self._context.name} announced {planned} rows for step {plan.step_id}, but "
                f"plans attention of {len(tables.slots)}" + " again" * self._announced
            )
        self._announced = True
        header, body = tables.pack()
        with self._context.timer.stage(Stage.DISPATCH):
            pending = [
                self._messages.send(part, peer, "telling its step to")
                for peer in self._context.topology.serving_world
                for part in (header, body)
            ]
            for sending in pending:
                self._messages.wait(sending, "telling its step to")

    def __call__(self, form: Form, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Store a layer's keys and values, and attend, on the attention ranks.

        Args:
            inputs: [n, width] for every width in the form: queries, keys and values of each head.

        Returns:
            [n, `form.output`].  While the rank starts zeros, and nothing is sent.

        Raises:
            RuntimeError: outside of a step, or it is not the next layer, or the rows are not as
                many as the plan says.
        """
        plan, name, rows = self._plan, self._context.name, inputs[0]
        if plan is None:
            if self._context.serving:
                raise RuntimeError(
                    f"{name} ran attention outside of an agreed step; its outputs would be missing"
                )
            return rows.new_zeros(len(rows), form.output)
        if not self._announced or self._forms[self._done : self._done + 1] != (form,):
            raise RuntimeError(
                f"{name} ran attention of layer {form.layer} as number {self._done} of "
                f"{len(self._forms)} in step {plan.step_id}, which the attention ranks do not "
                f"expect"
            )
        if len(rows) != plan.rows[self._context.rank]:
            raise RuntimeError(
                f"{name} announced {plan.rows[self._context.rank]} rows for step {plan.step_id}, "
                f"but attention of layer {form.layer} got {len(rows)}"
            )
        self._done += 1
        peers, timer = self._context.topology.serving_world, self._context.timer
        with timer.stage(Stage.DISPATCH):
            shares = scatter([part.cpu() for part in inputs], len(peers))
            pending = [self._messages.send(*to) for to in zip(shares, peers, strict=True)]
            for sending in pending:
                self._messages.wait(sending)
        width = form.share(len(peers)).output
        with timer.stage(Stage.COMBINE):
            parts = [torch.empty(len(rows), width, dtype=rows.dtype) for _ in peers]
            for part, peer in zip(parts, peers, strict=True):
                self._messages.receive(part, peer)
        return torch.cat(parts, dim=1).to(rows.device)
