"""Decode rounds in which this A rank has no rows: it takes part without holding anything up.

F takes a flag of every A rank in every decode round, so a rank that is idle or runs a prefill must
send them too, layer by layer.  One CUDA graph of all layers does so, on a stream of its own, at the
pace of the ranks that decode: their step does not wait for this rank's prefill in it.  Their next
one does, for the rounds begin after what the forward stream did before (docs/kernels.md).
"""

from __future__ import annotations

import torch

from sglang_afd.dispatch.step_plan import recorded
from sglang_afd.dispatch.transport import RoutedRows, Transport


class EmptyRounds:
    """This rank's part of one decode round of a lane without rows of its own, in every layer."""

    def __init__(self, transport: Transport, layers: int, rows: RoutedRows, lane: int) -> None:
        """Record the graph; the transport's kernels are loaded already.

        Args:
            layers: MoE layers of the model.
            rows: no rows, in the form of the model's: [0, H], [0, K], [0, K].
        """
        # of a priority of its own, so that it is none of the streams that SGLang draws
        self._stream = torch.cuda.Stream(priority=-1)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for _ in range(layers):
                transport.combine(transport.dispatch(rows, recorded(lane)))

    def start(self, rounds: int) -> None:
        """Take part in that many rounds a layer, after what the current stream did so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(rounds):
                self._graph.replay()

    def finish(self) -> None:
        """What the current stream does from now on comes after the rounds."""
        torch.cuda.current_stream().wait_stream(self._stream)
