"""Exchanges of a transport with emulated ranks, all ranks in one process; everything is checked."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from sglang_afd.dispatch import draws
from sglang_afd.dispatch.channel import Shape, channel_bytes, layouts
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.emulation import Emulation
from sglang_afd.kernels import exchange_reference as reference
from tests.support.local_ends import (
    expected,
    make_transports,
    present_part,
    random_rows,
    run_experts,
)


def exchange_of_sources(
    emulation: Emulation, shape: Shape, *, per_rank: int, lanes: int, device: str = "cpu"
) -> None:
    """Decode rounds of all lanes, with full, partly filled and empty ranks.

    F gets as many rows of every source as the real rank sends, with the drawn experts; the real
    rank gets its own rows back, from the experts that are there; the others' go to the scratch of
    the rank that stands for them.
    """
    real, cap = emulation.real, shape.cap
    width, experts = real.attention_tp, per_rank * len(emulation.whole.ffn_world)
    memory: list[torch.Tensor] = []
    transports = make_transports(
        real,
        experts,
        shape,
        Caps(cap, 4),
        lanes,
        emulation=emulation,
        memory=memory,
        device=device,
    )
    for arena in memory:
        _fill_with_nan(arena, emulation, shape, lanes)
    for number, counts in enumerate(([cap, cap], [1, 2], [0, cap], [2, 0], [cap, 1]), start=1):
        for lane in range(lanes):
            draw = random.Random(f"{number} {lane}")
            rows = [random_rows(draw, n, shape, experts, device) for n in counts[:width]]
            round_ = Round(Path.DECODE, 0, (*counts[:width], *[0] * width), lane)
            ids = ids_of_sources(emulation, rows, number, cap=cap, experts=experts, lane=lane)
            _one(emulation, transports, rows, ids, round_, per_rank)
            _check_scratch(emulation, memory, rows, ids, shape, (number, lane), per_rank)


def ids_of_sources(
    emulation: Emulation,
    rows: Sequence[RoutedRows],
    number: int,
    *,
    cap: int,
    experts: int,
    lane: int = 0,
) -> torch.Tensor:
    """[sources, cap, K] int32: the global ids of all sources' rows in a channel's exchange.

    Args:
        rows: of the real ranks.
        number: of the exchange, from 1.
        experts: of the whole deployment.
    """
    top_k, device = rows[0].expert_ids.shape[1], rows[0].expert_ids.device
    sources = len(emulation.served.attention_world)
    ids = torch.full((sources, cap, top_k), -1, dtype=torch.int32, device=device)
    for rank, own in enumerate(rows):
        ids[rank, : own.hidden.shape[0]] = own.expert_ids.int()
        drawn = draws.draw(
            emulation, rank, cap=cap, num_experts=experts, top_k=top_k, lane=lane
        ).to(device)
        others = list(emulation.emulated_by(rank))
        ids[others] = reference.drawn_ids(own.expert_ids, drawn[number % len(drawn)])
        present = int((own.expert_ids >= 0).any(dim=1).sum())
        assert (ids[others] >= 0).any(dim=2).sum(dim=1).tolist() == [present] * len(others)
    return ids


def _one(
    emulation: Emulation,
    transports: Sequence[NvlinkTransport],
    rows: Sequence[RoutedRows],
    ids: torch.Tensor,
    round_: Round,
    per_rank: int,
) -> None:
    """One round, what F gets in it and what A gets back."""
    handles = [transports[rank].dispatch(own, round_) for rank, own in enumerate(rows)]
    cap, top_k = ids.shape[1:]
    for index, ffn_rank in enumerate(emulation.real.ffn_world):
        batch, handle = transports[ffn_rank].receive(round_)
        local = reference.local_ids(ids.flatten(0, 1), index, per_rank)
        assert torch.equal(batch.expert_ids, local)
        for source in range(ids.shape[0]):
            host = rows[emulation.host_of(source)]
            block = slice(source * cap, source * cap + host.hidden.shape[0])
            sent = (local[block] >= 0).any(dim=1)
            assert torch.equal(batch.hidden[block][sent], host.hidden[sent])
            equal = torch.full_like(host.weights, 1 / top_k)
            weights = host.weights if emulation.is_real(source) else equal
            assert torch.equal(batch.weights[block][sent], weights[sent])
        outputs = run_experts(batch.hidden, batch.expert_ids + index * per_rank)
        outputs[batch.expert_ids < 0] = torch.nan  # what no expert has written
        transports[ffn_rank].reply(outputs, handle)
    present = per_rank * len(emulation.real.ffn_world)
    for rank, own in enumerate(rows):
        got = transports[rank].combine(handles[rank])
        wanted = expected(present_part(own, present), present, len(emulation.real.ffn_world))
        assert torch.equal(got, wanted)


def _check_scratch(
    emulation: Emulation,
    memory: Sequence[torch.Tensor],
    rows: Sequence[RoutedRows],
    ids: torch.Tensor,
    shape: Shape,
    exchange: tuple[int, int],
    per_rank: int,
) -> None:
    """What came back for emulated ranks, each in a part of its own on the rank that hosts it."""
    number, lane = exchange
    real = emulation.real
    part, _ = layouts(emulation.served, shape)
    stretch = channel_bytes(emulation.served, shape, emulation.whole.attention_ranks)
    for rank, own in enumerate(rows):
        for source in emulation.emulated_by(rank):
            start = lane * stretch + source // len(real.attention_world) * part.size
            scratch = part.rows.of(memory[rank][start:])
            count = own.hidden.shape[0]
            for index in range(len(real.ffn_world)):
                local = reference.local_ids(ids[source, :count], index, per_rank)
                weights = torch.full_like(own.weights, 1 / shape.top_k)
                outputs = run_experts(own.hidden, local + index * per_rank)
                wanted = reference.reduce_places(outputs, local, weights)
                sent = (local >= 0).any(dim=1)
                assert torch.equal(scratch[index, :count][sent], wanted[sent])
            assert part.flags.of(memory[rank][start:]).tolist() == [number] * len(real.ffn_world)


def _fill_with_nan(arena: torch.Tensor, emulation: Emulation, shape: Shape, lanes: int) -> None:
    """What no one has written yet is not a number; flags show no exchange."""
    arena[: arena.numel() // 4 * 4].view(torch.float32).fill_(torch.nan)
    on_attention, on_ffn = layouts(emulation.served, shape)
    hosted = emulation.whole.attention_ranks
    stretch = channel_bytes(emulation.served, shape, hosted)
    for lane in range(lanes):
        on_ffn.flags.of(arena[lane * stretch :]).zero_()
        for part in range(hosted):
            on_attention.flags.of(arena[lane * stretch + part * on_attention.size :]).zero_()
