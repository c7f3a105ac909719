"""How many bytes each transport holds, computed before anything is started.

A rank *keeps* its buffers from the start on; what a round needs on top comes and goes with it, but
must fit beside the KV cache.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from sglang_afd.emulation import DRAWS
from sglang_afd.topology import Topology

_MIB = 2**20
_FP8_BLOCK = 128  # elements of a row that share one scale
_ALIGNMENT = 256  # of a field in an nvlink channel
_SIGNAL_PAD = 2048
"""PyTorch appends this to symmetric memory."""
_MAPPED_STEP = 2 * _MIB
"""CUDA maps memory between processes in steps of this."""
_HEAP_STEP = 512 * _MIB
"""NVSHMEM's heap grows by this (DeepEP sets it); the first step also holds NVSHMEM's own things."""
_HEAP_OWN = 64 * _MIB
_DEEPEP_TILE = 128
"""Rows that the masked grouped GEMM writes at a time: it would write past an expert's last row into
the next expert's."""
_DEEPEP_FIXED = 36 * _MIB
"""DeepEP's workspace of 32 MiB and 4 MiB more: measured, docs/gpu_runs.md."""


class Held(NamedTuple):
    """Bytes on one rank."""

    kept: int
    passing: int
    """The largest round's tensors, at their peak."""


class Buffers(NamedTuple):
    """Bytes that a transport takes on one rank of each role."""

    attention: Held
    ffn: Held


class Rows(NamedTuple):
    """What travels: the rows' form and how many at once."""

    num_experts: int
    hidden_size: int
    top_k: int
    itemsize: int
    """Bytes of one element of a row."""
    fp8: bool
    """The experts are FP8, so a transport may send rows as FP8."""
    decode: int
    """T: rows of an A rank in one round."""
    block: int
    """P: rows of all A ranks in one bulk block."""
    lanes: int = 1
    """Decode batches in flight; bulk blocks have no more than one."""
    emulated: int = 0
    """Sources that each A rank stands for beside itself, see `sglang_afd.emulation`."""

    def sources(self, topology: Topology) -> int:
        """A ranks whose rows an F rank gets in a decode round."""
        return len(topology.attention_world) * (1 + self.emulated)

    def at_once(self, decode: int, block: int) -> int:
        """Rows under way at the same time: `decode` of a lane's round, `block` of a bulk block.

        One lane takes turns with the prefills; several lanes and a prefill do not.
        """
        return max(decode, block) if self.lanes == 1 else self.lanes * decode + block


def gloo(topology: Topology, rows: Rows) -> Buffers:
    """Nothing is kept; a round's rows and their routing pass through, for every peer."""
    owners = len(topology.ffn_world)
    sent = rows.at_once(rows.decode, rows.block)
    received = rows.at_once(rows.sources(topology) * rows.decode, rows.block)
    row = rows.hidden_size * rows.itemsize + 8 * rows.top_k
    output = rows.top_k * rows.hidden_size * rows.itemsize
    return Buffers(
        Held(0, owners * (sent + rows.emulated * rows.decode) * row + sent * rows.hidden_size * 4),
        Held(0, received * (2 * row + output)),
    )


def deepep_cap(topology: Topology, cap: int) -> int:
    """The rows that DeepEP is asked to carry for T = `cap`.

    A rank can get world size times as many for an expert: whole tiles of its GEMM.
    """
    step = _DEEPEP_TILE // gcd(_DEEPEP_TILE, topology.world_size)
    return -(-cap // step) * step


def deepep(topology: Topology, rows: Rows) -> Buffers:
    """NVSHMEM's heap, DeepEP's workspace, and each round's received rows and expert outputs.

    The heap holds DeepEP's low-latency buffer: for S slots (ceil(E / F) on each rank of the world),
    messages of d = 16 + 2 H bytes out and c = 2 H + 4 H / 128 back, two rounds of
    max(T d, S T c) + S T max(d, c) + 4 S bytes (its ``get_low_latency_rdma_size_hint``).
    """
    per_rank = -(-rows.num_experts // len(topology.ffn_world))
    slots, cap = per_rank * topology.world_size, deepep_cap(topology, rows.decode)
    out = 16 + 2 * rows.hidden_size
    back = 2 * rows.hidden_size + 4 * rows.hidden_size // _FP8_BLOCK
    hint = 2 * (max(cap * out, slots * cap * back) + slots * cap * max(out, back))
    hint += 2 * _aligned(4 * slots, 128)
    grown = 0 if hint + _HEAP_OWN <= _HEAP_STEP else _aligned(hint, _HEAP_STEP)
    kept = _HEAP_STEP + grown + _DEEPEP_FIXED
    wire = rows.hidden_size + 4 * rows.hidden_size // _FP8_BLOCK if rows.fp8 else out - 16
    received = slots * cap * wire
    empty_output = slots * cap * 2 * rows.hidden_size
    return Buffers(Held(kept + empty_output, received), Held(kept, received + empty_output))


def nvlink(topology: Topology, rows: Rows) -> Buffers:
    """An arena of the same size on all ranks, and the outputs of the experts' largest rounds.

    An A rank that stands for others keeps draws of their rows' routing, too.
    """
    channels = rows.lanes * _channel(topology, rows, rows.decode, 1 + rows.emulated)
    channels += _channel(topology, rows, rows.block, 1)
    kept = _aligned(channels + _SIGNAL_PAD, _MAPPED_STEP)
    draws = rows.lanes * DRAWS * rows.emulated * rows.decode * rows.top_k * 4
    sources = rows.sources(topology)
    most = rows.at_once(sources * rows.decode, rows.block)
    row = rows.hidden_size * rows.itemsize
    copied = most * (row + 8 * rows.top_k) if sources > 1 else 0
    back = rows.at_once(rows.decode, rows.block) * row
    return Buffers(Held(kept + draws, back), Held(kept, most * rows.top_k * row + copied))


def _channel(topology: Topology, rows: Rows, cap: int, sources: int) -> int:
    """As `sglang_afd.dispatch.channel.channel_bytes`, which needs torch.

    Args:
        sources: of each A rank, itself among them.
    """

    def fields(peers: int, routed: int) -> int:
        sizes = (
            peers * cap * rows.hidden_size * rows.itemsize,
            8 * peers,
            4 * peers * routed * rows.top_k,
            4 * peers * routed * rows.top_k,
        )
        return sum(_aligned(size, _ALIGNMENT) for size in sizes)

    return max(
        sources * fields(len(topology.ffn_world), 0),
        fields(sources * len(topology.attention_world), cap),
    )


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step


ESTIMATES = {"gloo": gloo, "deepep": deepep, "nvlink": nvlink}
