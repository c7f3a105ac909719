"""Real processes that exchange rows over `nvlink`; they share a GPU where there are not enough."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path as File

import torch
import torch.distributed as dist

from sglang_afd.dispatch.arena import symmetric_arena
from sglang_afd.dispatch.channel import Shape
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.emulation import Emulation
from sglang_afd.kernels.exchange_reference import local_ids
from sglang_afd.topology import Role, Topology
from tests.support.emulated import ids_of_sources
from tests.support.local_ends import expected, present_part, random_rows, run_experts

EXPERTS, TOP_K, HIDDEN = 16, 4, 272
CAPS = Caps(decode=8, bulk=64)
SHAPE = Shape(64, HIDDEN, TOP_K, torch.bfloat16)
ROUNDS = 60


def rounds(topology: Topology, seed: int) -> list[Round]:
    """Rounds of both paths with all sorts of counts."""
    draw = random.Random(seed)
    made = []
    for _ in range(ROUNDS):
        path = draw.choice((Path.DECODE, Path.BULK))
        cap = CAPS.decode if path is Path.DECODE else CAPS.bulk
        assert cap is not None
        counts = [draw.choice((0, 1, cap - 1, cap)) for _ in topology.attention_world]
        counts[draw.randrange(len(counts))] = cap
        made.append(Round(path, 0, (*counts, *(0 for _ in topology.ffn_world))))
    return made


def run(
    rank: int, attention: int, ffn: int, folder: str, seed: int, silent: int, whole: Topology
) -> None:
    """One rank; `silent`: the world rank that stops half-way, or -1; `whole`: what is emulated."""
    topology = Topology(attention, ffn)
    emulation = Emulation(topology, whole)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=topology.world_size
    )
    transport = NvlinkTransport(
        topology=topology,
        rank=rank,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        dtype=torch.bfloat16,
        caps=CAPS,
        timeout=5.0,
        make_arena=lambda size: symmetric_arena(size, dist.group.WORLD),
        emulation=emulation,
    )
    decoded = 0
    try:
        for index, round_ in enumerate(rounds(topology, seed)):
            if rank == silent and index == ROUNDS // 2:
                time.sleep(60)
            decoded += round_.path is Path.DECODE
            sent = [
                random_rows(
                    random.Random(f"{seed} {index} {peer}"),
                    round_.counts[peer],
                    SHAPE,
                    EXPERTS,
                    "cuda",
                )
                for peer in topology.attention_world
            ]
            one_round(transport, emulation, rank, round_, sent, decoded)
        torch.cuda.synchronize()
        report = "ok"
    except torch.AcceleratorError as error:
        report = transport.failure(error) or repr(error)
    File(folder, f"rank{rank}.part").write_text(report)
    File(folder, f"rank{rank}.part").rename(File(folder, f"rank{rank}.txt"))
    if silent < 0:
        dist.barrier()
    os._exit(0)


def one_round(
    transport: NvlinkTransport,
    emulation: Emulation,
    rank: int,
    round_: Round,
    sent: list[RoutedRows],
    decoded: int,
) -> None:
    """This rank's part of a round: an A rank checks every bit of what comes back, and an F rank
    the ids of all sources' rows.

    Args:
        sent: what every A rank sends.
        decoded: number of the decode exchange, if it is one.
    """
    topology = emulation.real
    present = emulation.present_experts(EXPERTS)
    if topology.role_of(rank) is Role.FFN:
        batch, handle = transport.receive(round_)
        first = emulation.experts_of(rank, EXPERTS).start
        if round_.path is Path.DECODE:
            ids = ids_of_sources(emulation, sent, decoded, cap=CAPS.decode, experts=EXPERTS)
            index = topology.ffn_world.index(rank)
            per_rank = len(emulation.experts_of(rank, EXPERTS))
            assert torch.equal(batch.expert_ids, local_ids(ids.flatten(0, 1), index, per_rank))
        transport.reply(run_experts(batch.hidden, batch.expert_ids + first), handle)
    elif round_.joins(rank):
        got = transport.combine(transport.dispatch(sent[rank], round_))
        mine = present_part(sent[rank], present)
        assert torch.equal(got, expected(mine, present, len(topology.ffn_world)))


if __name__ == "__main__":
    rank_, attention_, ffn_, folder_, seed_, silent_, *whole_ = sys.argv[1:]
    stood_for = Topology(*map(int, whole_ or (attention_, ffn_)))
    run(int(rank_), int(attention_), int(ffn_), folder_, int(seed_), int(silent_), stood_for)
