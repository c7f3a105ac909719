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
from sglang_afd.topology import Role, Topology
from tests.support.local_ends import expected, random_rows, run_experts

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


def run(rank: int, attention: int, ffn: int, folder: str, seed: int, silent: int) -> None:
    """One rank; `silent`: the world rank that stops half-way, or -1."""
    topology = Topology(attention, ffn)
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
    )
    try:
        for index, round_ in enumerate(rounds(topology, seed)):
            if rank == silent and index == ROUNDS // 2:
                time.sleep(60)
            one_round(transport, topology, rank, round_, random.Random(f"{seed} {index} {rank}"))
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
    transport: NvlinkTransport, topology: Topology, rank: int, round_: Round, draw: random.Random
) -> None:
    """This rank's part of a round; an A rank checks every bit of what comes back."""
    if topology.role_of(rank) is Role.FFN:
        batch, handle = transport.receive(round_)
        first = topology.experts_of(rank, EXPERTS).start
        transport.reply(run_experts(batch.hidden, batch.expert_ids + first), handle)
    elif round_.joins(rank):
        rows = random_rows(draw, round_.counts[rank], SHAPE, EXPERTS, "cuda")
        got = transport.combine(transport.dispatch(rows, round_))
        assert torch.equal(got, expected(rows, EXPERTS, len(topology.ffn_world)))


if __name__ == "__main__":
    rank_, attention_, ffn_, folder_, seed_, silent_ = sys.argv[1:]
    run(int(rank_), int(attention_), int(ffn_), folder_, int(seed_), int(silent_))
