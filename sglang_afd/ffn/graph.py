"""F's decode step as one CUDA graph: every layer's receive, experts and reply, launched once.

How many rows came, and for which experts, is read on the device; so one graph serves every decode
step of one round, whatever the A ranks' batches are and whether they replay graphs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_afd.dispatch.step_plan import RECORDED, Path, StepPlan
from sglang_afd.dispatch.transport import Transport
from sglang_afd.ffn.serve import Experts, serve_rounds
from sglang_afd.observe.stages import StepTimer


class GraphServer:
    """Serves steps; decode on a stream of its own, so that blocks of prefills run beside it."""

    def __init__(self, layers: Sequence[Experts], transport: Transport, timer: StepTimer) -> None:
        """Record the graph; the kernels of the transport and the experts are loaded already."""
        self._layers, self._transport, self._timer = layers, transport, timer
        # of a priority of its own, so that it is none of the streams that SGLang draws
        self._stream = torch.cuda.Stream(priority=-1)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            serve_rounds([RECORDED], layers, transport, timer)

    def serve(self, plan: StepPlan) -> None:
        """Queue one forward of the A ranks; the device may still be at earlier ones."""
        decode, bulk = plan.rounds_of(Path.DECODE), plan.rounds_of(Path.BULK)
        with torch.cuda.stream(self._stream), self._timer.step(plan, decode):
            if len(decode) == 1:
                self._graph.replay()
            else:  # slices of longer batches take turns in every layer
                serve_rounds(decode, self._layers, self._transport, self._timer)
        if bulk:
            with self._timer.step(plan, bulk):
                serve_rounds(bulk, self._layers, self._transport, self._timer)
