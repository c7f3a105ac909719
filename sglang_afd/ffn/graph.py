"""F's decode step of a lane as one CUDA graph: every layer's receive, experts and reply, launched
once.

How many rows came, and for which experts, is read on the device; so one graph serves every decode
step of one round, whatever the A ranks' batches are and whether they replay graphs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_afd.dispatch.step_plan import Path, StepPlan, recorded
from sglang_afd.dispatch.transport import Transport
from sglang_afd.dispatch.turns import Turns
from sglang_afd.ffn.serve import Experts, serve_rounds
from sglang_afd.observe.stages import StepTimer


class _Recorded:
    """A lane's graph of one decode round, and the stream that its decode runs on."""

    def __init__(
        self, layers: Sequence[Experts], transport: Transport, turns: Turns, lane: int
    ) -> None:
        # of a priority of its own, so that it is none of the streams that SGLang draws
        self.stream = torch.cuda.Stream(priority=-1)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for experts in layers:
                batch, handle = transport.receive(recorded(lane))
                turns.take()
                transport.reply(experts(batch), handle)
                turns.end()


class GraphServer:
    """Serves steps; each lane's decode on a stream of its own, beside the blocks of prefills."""

    def __init__(
        self,
        layers: Sequence[Experts],
        transport: Transport,
        timer: StepTimer,
        *,
        lanes: int,
        turns: Turns,
    ) -> None:
        """Record the graphs; the kernels of transport, experts and turns are loaded already."""
        self._layers, self._transport, self._timer = layers, transport, timer
        self._lanes = [_Recorded(layers, transport, turns, lane) for lane in range(lanes)]

    def serve(self, plan: StepPlan) -> None:
        """Queue one forward of the A ranks; the device may still be at earlier ones."""
        decode, bulk = plan.rounds_of(Path.DECODE), plan.rounds_of(Path.BULK)
        if decode:
            lane = self._lanes[plan.lane]
            with torch.cuda.stream(lane.stream), self._timer.step(plan, decode):
                if len(decode) == 1:
                    lane.graph.replay()
                else:  # slices of longer batches take turns in every layer
                    serve_rounds(decode, self._layers, self._transport, self._timer)
        if bulk:
            with self._timer.step(plan, bulk):
                serve_rounds(bulk, self._layers, self._transport, self._timer)
