"""Real processes with several lanes in flight over `nvlink`, each lane a stream and a CUDA graph.

1A1F.  Neither rank orders its lanes: they are replayed in another random order on each side, with
random delays inside, so that every lane's exchanges meet when they meet.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path as File

import torch
import torch.distributed as dist

from sglang_afd.dispatch.arena import symmetric_arena
from sglang_afd.dispatch.channel import Shape
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.topology import Topology
from tests.support.local_ends import expected, run_experts

EXPERTS, TOP_K, HIDDEN, CAP = 16, 4, 256, 48
SHAPE = Shape(CAP, HIDDEN, TOP_K, torch.bfloat16)
TOPOLOGY = Topology(1, 1)
CAPTURED = 20
"""Exchanges of one graph."""
IN_FLIGHT = 10
"""Replays of every lane that are queued at a time."""
ROUND = Round(Path.DECODE, 0, (CAP, 0))


def run(rank: int, lanes: int, folder: str, seed: int, rounds: int) -> None:
    """One rank; the A rank writes how many elements were wrong, or what failed."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    draw = random.Random(f"{seed} {rank}")
    works = [_lane(rank, lane, draw) for lane in range(lanes)]
    dist.barrier()
    graphs = []
    for work, _ in works:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CAPTURED):
                work()
        graphs.append((stream, graph))
    for _ in range(rounds // (CAPTURED * IN_FLIGHT)):
        order = [lane for lane in range(lanes) for _ in range(IN_FLIGHT)]
        draw.shuffle(order)
        for lane in order:
            stream, graph = graphs[lane]
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
    wrong = sum(int(bad) for _, bad in works)
    File(folder, f"rank{rank}.txt").write_text(str(wrong))
    dist.barrier()
    os._exit(0)


def _lane(rank: int, lane: int, draw: random.Random) -> tuple[Callable[[], None], torch.Tensor]:
    """One exchange of a lane, and the count of elements that were not the reference's."""
    transport = NvlinkTransport(
        topology=TOPOLOGY,
        rank=rank,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        dtype=torch.bfloat16,
        caps=Caps(CAP, 1),
        timeout=20.0,
        make_arena=lambda size: symmetric_arena(size, dist.group.WORLD),
    )
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    generator = torch.Generator().manual_seed(lane)
    hidden = torch.randn(CAP, HIDDEN, generator=generator).bfloat16().cuda()
    ids = torch.rand(CAP, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].int().cuda()
    if lane % 3 == 1:  # all rows to one expert
        ids.zero_()
        ids[:, 1:] = -1
    weights = torch.rand(CAP, TOP_K, generator=generator).cuda()

    def pause() -> None:
        torch.cuda._sleep(draw.choice((0, 0, 10_000, 80_000)))

    def attention() -> None:
        hidden.copy_((hidden.float().roll(1, 1) * 1.0009765625).bfloat16().clamp(-9, 9))
        ids.copy_(ids.roll(1, 0))
        pause()
        rows = RoutedRows(hidden, ids, weights)
        sent = transport.dispatch(rows, ROUND)
        pause()
        wrong.add_((transport.combine(sent) != expected(rows, EXPERTS, 1)).sum())

    def ffn() -> None:
        pause()
        batch, handle = transport.receive(ROUND)
        transport.reply(run_experts(batch.hidden, batch.expert_ids), handle)

    work = ffn if rank else attention
    work()  # loads every kernel
    torch.cuda.synchronize()
    return work, wrong


if __name__ == "__main__":
    rank_, lanes_, folder_, seed_, rounds_ = sys.argv[1:]
    run(int(rank_), int(lanes_), folder_, int(seed_), int(rounds_))
