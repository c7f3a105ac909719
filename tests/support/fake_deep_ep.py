"""DeepEP's low-latency buffers between threads of one process, on CPU tensors.

`Network.module` stands for the `deep_ep` package: the same calls with the same shapes, dtypes and
order of rows, and with the checks that the real kernels make (or that make them hang or corrupt).
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch

_BLOCK = 128


class Network:
    """What `world_size` ranks put on the wire; every call is a collective of all of them."""

    def __init__(self, world_size: int, timeout: float = 5.0) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=timeout)
        self.posted: list[Any] = [None] * world_size
        self.buffers: list[Buffer] = []
        self.module = ModuleType("deep_ep")
        self.module.Buffer = self._buffer_class()  # type: ignore[attr-defined]

    def _buffer_class(self) -> type[Buffer]:
        network = self

        class Bound(Buffer):
            def __init__(self, group: int, *args: Any, **kwargs: Any) -> None:
                super().__init__(network, group, *args, **kwargs)
                network.buffers.append(self)

        return Bound

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """All ranks' values, in rank order."""
        self.posted[rank] = value
        self.barrier.wait()
        values = list(self.posted)
        self.barrier.wait()
        return values


class Buffer:
    """One rank's buffer; its process group is faked by the rank's number."""

    def __init__(
        self,
        network: Network,
        group: int,
        num_nvl_bytes: int,
        num_rdma_bytes: int,
        *,
        low_latency_mode: bool,
        num_qps_per_rank: int,
    ) -> None:
        assert low_latency_mode and num_nvl_bytes == 0
        self.network, self.rank = network, group
        self.size, self.num_qps = num_rdma_bytes, num_qps_per_rank

    @staticmethod
    def get_low_latency_rdma_size_hint(cap: int, hidden: int, ranks: int, experts: int) -> int:
        """Bytes of the real layout: two rounds' send, receive and flag parts."""
        assert experts % ranks == 0
        scales = hidden // _BLOCK
        dispatched = 16 + max(2 * hidden, hidden + 4 * scales)
        combined = 4 * scales + 2 * hidden
        rows = experts * cap * combined + experts * cap * max(dispatched, combined)
        flags = -(-(experts * 8 + experts // ranks * 4) // 128) * 128
        return -(-(2 * (rows + flags)) // 128) * 128

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
    ) -> tuple[Any, torch.Tensor, Any, None, None]:
        """Rows of every local slot, first by source rank; what lies past the counts is garbage."""
        cap = num_max_dispatch_tokens_per_rank
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        assert x.shape[0] == topk_idx.shape[0] <= cap
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        assert self.size >= self.get_low_latency_rdma_size_hint(
            cap, x.shape[1], self.network.world_size, num_experts
        )
        local = num_experts // self.network.world_size
        received = torch.full((local, self.network.world_size * cap, x.shape[1]), torch.nan)
        counts = torch.zeros(local, dtype=torch.int32)
        sources: dict[tuple[int, int, int], int] = {}  # (slot, source, row) -> place
        for source, (rows, slots) in enumerate(self.network.exchange(self.rank, (x, topk_idx))):
            for row, place in (slots // local == self.rank).nonzero().tolist():
                slot = int(slots[row, place]) % local
                sources[slot, source, row] = int(counts[slot])
                received[slot, counts[slot]] = rows[row].float()
                counts[slot] += 1
        handle = (sources, topk_idx, num_experts)
        out: Any = received.bfloat16()
        return (_to_fp8(received) if use_fp8 else out), counts, handle, None, None

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, None, None]:
        """[n, H]: every row the sum over its places of weight times the slot's output."""
        sources, dispatched, num_experts = handle
        assert torch.equal(topk_idx, dispatched), "combine was given another round's routing"
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape
        local = num_experts // self.network.world_size
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[0] == local
        peers = self.network.exchange(self.rank, (x, sources))
        total = torch.zeros(topk_idx.shape[0], x.shape[2])
        for row, place in (topk_idx >= 0).nonzero().tolist():
            owner, slot = divmod(int(topk_idx[row, place]), local)
            output, places = peers[owner]
            value = output[slot, places[slot, self.rank, row]].float()
            total[row] += topk_weights[row, place] * value
        return total.bfloat16(), None, None


def _to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., H] -> e4m3 rows and a float32 scale for every 128 elements."""
    blocks = rows.unflatten(-1, (-1, _BLOCK))
    scales = blocks.abs().amax(dim=-1).clamp(min=1e-4) / 448
    return (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2), scales
