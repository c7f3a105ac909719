"""All ends of a channel in one process: every rank's arena is ordinary memory of one device."""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

import torch

from sglang_afd.dispatch.channel import (
    BLOCKS,
    Arena,
    AttentionEnd,
    FfnEnd,
    Shape,
    Waits,
    channel_bytes,
)
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import Caps
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.emulation import Emulation
from sglang_afd.kernels import exchange_reference as reference
from sglang_afd.topology import Topology


class Ends(NamedTuple):
    """A channel's ends on all ranks."""

    topology: Topology
    num_experts: int
    shape: Shape
    attention: list[AttentionEnd]
    ffn: list[FfnEnd]
    waits: Waits
    memory: list[torch.Tensor]


def make_ends(
    topology: Topology,
    num_experts: int,
    shape: Shape,
    *,
    device: str = "cpu",
    seconds: float = 5.0,
    offset: int = 0,
    blocks: int = BLOCKS,
) -> Ends:
    """A channel over arenas of its own, with `offset` bytes before it and as many after it."""
    size = 2 * offset + channel_bytes(topology, shape)
    memory = [
        torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(topology.world_size)
    ]
    addresses = tuple(arena.data_ptr() for arena in memory)
    arenas = [Arena(local, addresses) for local in memory]
    failure = torch.zeros(2, dtype=torch.int64, pin_memory=device != "cpu")
    waits = Waits(failure, seconds)
    return Ends(
        topology,
        num_experts,
        shape,
        [
            AttentionEnd(topology, rank, num_experts, shape, arenas[rank], offset, waits, blocks)
            for rank in topology.attention_world
        ],
        [
            FfnEnd(topology, rank, shape, arenas[rank], offset, waits, blocks)
            for rank in topology.ffn_world
        ],
        waits,
        memory,
    )


def random_rows(
    draw: random.Random, count: int, shape: Shape, num_experts: int, device: str = "cpu"
) -> RoutedRows:
    """Rows with distinct experts, of which some places are empty."""
    generator = torch.Generator().manual_seed(draw.getrandbits(60))
    ids = torch.rand(count, num_experts, generator=generator).argsort(dim=1)[:, : shape.top_k]
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    if count:
        ids[0] = -1  # a row that no expert wants
    return RoutedRows(
        torch.randn(count, shape.hidden_size, generator=generator).to(shape.dtype).to(device),
        ids.to(device),
        torch.rand(count, shape.top_k, generator=generator).to(device),
    )


def run_experts(hidden: torch.Tensor, global_ids: torch.Tensor) -> torch.Tensor:
    """[R, H] rows and [R, K] ids -> [R, K, H]: a stand-in for experts that tells them apart."""
    scale = 0.5 + (global_ids % 7).float() / 8
    return (hidden.float()[:, None] * scale[..., None]).to(hidden.dtype).contiguous()


def expected(rows: RoutedRows, num_experts: int, ffn_ranks: int) -> torch.Tensor:
    """What an A rank must get back, bit for bit."""
    per_rank = num_experts // ffn_ranks
    outputs = run_experts(rows.hidden, rows.expert_ids)
    replies = []
    for ffn_rank in range(ffn_ranks):
        local = reference.local_ids(rows.expert_ids, ffn_rank, per_rank)
        replies.append(reference.reduce_places(outputs, local, rows.weights))
    return reference.sum_replies(torch.stack(replies), rows.expert_ids, per_rank)


def present_part(rows: RoutedRows, experts: int) -> RoutedRows:
    """`rows` with places for the first `experts` alone: the others have no rank."""
    ids = torch.where(rows.expert_ids < experts, rows.expert_ids, -1)
    return rows._replace(expert_ids=ids)


def make_transports(
    topology: Topology,
    num_experts: int,
    shape: Shape,
    caps: Caps,
    lanes: int,
    *,
    emulation: Emulation | None = None,
    memory: list[torch.Tensor] | None = None,
    device: str = "cpu",
    timeout: float = 5.0,
    layers: int = 0,
) -> list[NvlinkTransport]:
    """The transport of every rank, over arenas that are ordinary memory; `memory` gets those."""
    memory = [] if memory is None else memory

    def arena(rank: int, size: int) -> Arena:
        if not memory:
            memory.extend(
                torch.zeros(size, dtype=torch.uint8, device=device)
                for _ in range(topology.world_size)
            )
        assert memory[rank].numel() == size
        return Arena(memory[rank], tuple(local.data_ptr() for local in memory))

    return [
        NvlinkTransport(
            topology=topology,
            rank=rank,
            num_experts=num_experts,
            hidden_size=shape.hidden_size,
            top_k=shape.top_k,
            dtype=shape.dtype,
            caps=caps,
            timeout=timeout,
            make_arena=partial(arena, rank),
            lanes=lanes,
            layers=layers,
            emulation=emulation,
        )
        for rank in range(topology.world_size)
    ]
