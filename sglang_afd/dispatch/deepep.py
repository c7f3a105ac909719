"""The `deepep` transport: DeepEP's low-latency buffers between GPUs.

DeepEP knows one symmetric expert-parallel group, so the exchange is laid over a table of *slots*:
every rank of the world has ceil(E / F) of them, those of the A ranks stay empty, and expert e lies
in slot ``A * ceil(E / F) + e`` (A and F world ranks here).  Every rank calls dispatch and combine
in every round, also without rows; negative ids are skipped.  Combine applies the router's weights
on the A side.  Limits: see `sglang_afd.transport_gate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from sglang_afd.dispatch.buffers import deepep_cap
from sglang_afd.dispatch.step_plan import Caps, Round
from sglang_afd.dispatch.transport import MaskedBatch, RoutedRows, nothing
from sglang_afd.topology import Topology

_FP8_BLOCK = 128  # elements of a row that share one scale
_PATIENCE = 100  # seconds after which DeepEP's kernels give up, roughly; it cannot be set


class _Round(NamedTuple):
    """One round between dispatch and combine: what the second call must be given again."""

    slots: torch.Tensor  # [n, K] int64
    weights: torch.Tensor  # [n, K] float32
    handle: Any  # DeepEP's own


class DeepEpTransport:
    """One rank's end of the DeepEP exchange."""

    graphs = False
    stamps: Sequence[torch.Tensor] = ()
    """A graph would fix which of DeepEP's two buffers each of its rounds uses; eager rounds between
    replays change whose turn it is, and ranks would use different ones."""

    def __init__(
        self,
        *,
        topology: Topology,
        rank: int,
        num_experts: int,
        hidden_size: int,
        top_k: int,
        cap: int,
        fp8: bool,
        group: Any,
    ) -> None:
        """Allocate the buffer: a collective call of all world ranks.

        Args:
            cap: T, rows a rank sends in one round.
            fp8: send rows as FP8 with a scale every 128 elements (the experts are FP8), else BF16.
            group: the world's device process group.
        """
        from deep_ep import Buffer

        self.caps = Caps(cap, None)
        self._name = topology.name_of(rank)
        cap = deepep_cap(topology, cap)
        self._cap, self._top_k, self._hidden_size = cap, top_k, hidden_size
        self._num_experts, self._fp8 = num_experts, fp8
        per_rank = topology.experts_per_rank(num_experts)
        self._per_rank, self._world_size = per_rank, topology.world_size
        self._slots = per_rank * topology.world_size
        self._first_slot = per_rank * topology.ffn_world.start
        depth = max(int(os.environ.get("NVSHMEM_QP_DEPTH", "1024")), 2 * (cap + 1))
        os.environ["NVSHMEM_QP_DEPTH"] = str(depth)
        # NVSHMEM would make NCCL communicators for collectives that DeepEP never calls: 3.2 GiB a
        # GPU, measured (docs/gpu_runs.md).
        os.environ.setdefault("NVSHMEM_DISABLE_NCCL", "1")
        self._buffer = Buffer(
            group,
            0,
            Buffer.get_low_latency_rdma_size_hint(
                cap, hidden_size, topology.world_size, self._slots
            ),
            low_latency_mode=True,
            num_qps_per_rank=per_rank,
        )
        device = torch.device("cuda", torch.cuda.current_device())
        self._no_rows = RoutedRows(
            torch.empty(0, hidden_size, dtype=torch.bfloat16, device=device),
            torch.empty(0, top_k, dtype=torch.int64, device=device),
            torch.empty(0, top_k, dtype=torch.float32, device=device),
        )
        # Combine wants expert outputs of this shape on A ranks too; their slots hold none.
        self._no_output = None
        if rank in topology.attention_world:
            shape = (per_rank, topology.world_size * cap, hidden_size)
            self._no_output = torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def load(self) -> None:
        """See `Transport.load`: DeepEP's kernels are loaded with it, and it has met its peers."""

    def dispatch(
        self, rows: RoutedRows, round_: Round, own_sent: Callable[[], None] = nothing
    ) -> _Round:
        """See `Transport.dispatch`."""
        ids = rows.expert_ids.to(torch.int64)
        slots = torch.where(ids >= 0, ids + self._first_slot, -1)
        handle = self._exchange(rows.hidden.contiguous(), slots, rows.weights.float())[-1]
        own_sent()
        return handle

    def combine(self, handle: _Round) -> torch.Tensor:
        """See `Transport.combine`."""
        return self._return(self._no_output, handle)

    def receive(self, round_: Round) -> tuple[MaskedBatch, _Round]:
        """See `Transport.receive`."""
        received, per_slot, handle = self._exchange(*self._no_rows)
        hidden, scales = received if self._fp8 else (received, None)
        expected = -(-sum(round_.counts) * self._top_k // self._num_experts)
        return MaskedBatch(hidden, scales, per_slot, max(1, expected)), handle

    def reply(self, output: torch.Tensor, handle: _Round) -> None:
        """See `Transport.reply`."""
        self._return(output, handle)

    def samples(self) -> Iterator[MaskedBatch]:
        """Batches for few and for many rows of an expert, which run different kernels.

        Each has tensors of its own: the experts' kernels give their memory away.
        """
        shape = (self._per_rank, self._world_size * self._cap, self._hidden_size)
        device = self._no_rows.hidden.device
        expected, most = 1, max(1, shape[1] * self._top_k // self._num_experts)
        while expected <= most:
            dtype = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
            hidden = torch.zeros(shape, dtype=dtype, device=device)
            scales = None
            if self._fp8:
                # as DeepEP lays them out: the scales of a block of all rows lie side by side
                blocks = self._hidden_size // _FP8_BLOCK
                scales = torch.ones(shape[0], blocks, shape[1], device=device).transpose(1, 2)
            counts = torch.ones(self._per_rank, dtype=torch.int32, device=device)
            yield MaskedBatch(hidden, scales, counts, expected)
            expected *= 2

    def failure(self, error: Exception) -> str | None:
        """See `Transport.failure`; DeepEP's kernels name no peer."""
        if "CUDA error" not in str(error):
            return None
        return (
            f"{self._name} lost the use of its GPU. If nothing before names another cause, a peer "
            f"did not take part in an exchange: DeepEP's kernels then give up after about "
            f"{_PATIENCE} s and name no rank. Look for the rank whose log ends or fails first, and "
            f"restart the deployment"
        )

    def _exchange(
        self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Any, torch.Tensor, _Round]:
        received, per_slot, handle, _, _ = self._buffer.low_latency_dispatch(
            hidden, slots, self._cap, self._slots, use_fp8=self._fp8
        )
        return received, per_slot, _Round(slots, weights, handle)

    def _return(self, output: torch.Tensor | None, round_: _Round) -> torch.Tensor:
        combined, _, _ = self._buffer.low_latency_combine(
            output, round_.slots, round_.weights, round_.handle
        )
        return combined
