"""Round trip of the transports: dispatch and combine without experts, in a CUDA graph of 10 pairs.

    python -m benchmarks.transport --out FILE.json [--one-gpu]

One attention and one FFN rank, BF16 rows, top-8 of 128 experts that all lie on the FFN rank.  On
two GPUs each rank is a process with a GPU of its own, and `nvlink` is measured beside DeepEP's
low-latency kernels and DeepEP's second version where they are installed; `nvlink` with several
numbers of thread blocks.  With --one-gpu both ends of `nvlink` are streams of one process on one
GPU: that shows what the kernels and their launches cost, and nothing about NVLink.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path as File
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.progress import say
from benchmarks.ranks import as_rank, run_pair
from sglang_afd.dispatch.arena import symmetric_arena
from sglang_afd.dispatch.channel import Arena
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import MaskedBatch, RoutedRows, Transport
from sglang_afd.topology import Topology
from sglang_afd.validate import environment

TOKENS = (1, 16, 64, 128, 256, 512)
HIDDEN = (2048, 4096)
EXPERTS, TOP_K = 128, 8
BLOCKS = (16, 32, 64, 128)
"""Thread blocks at most of `nvlink`'s sending kernels: as many SMs, while they run."""
PAIRS = 10
REPEATS = 50
TOPOLOGY = Topology(1, 1)
BOUND = 120
"""Seconds for all counts of tokens of one transport and hidden size."""


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=File, required=True, help="where the record goes")
    parser.add_argument("--one-gpu", action="store_true", help="both ends on one GPU's streams")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        measured = partial(_measured_as, args.rank, args.transport, args.hidden)
        as_rank(args.rank, args.meet, measured, args.out)
    results: dict[str, Any] = {}
    record = {"identity": environment.describe(), "one_gpu": args.one_gpu, "results": results}
    with_deepep = importlib.util.find_spec("deep_ep") is not None and not args.one_gpu
    for name in ("nvlink", "deepep", "deepep_v2") if with_deepep else ("nvlink",):
        results[name] = {}
        for hidden in HIDDEN:
            results[name][hidden] = (
                _sizes(name, hidden, _one_gpu) if args.one_gpu else _two_gpus(name, hidden)
            )
            args.out.write_text(json.dumps(record, indent=1) + "\n")


def _sizes(
    name: str, hidden: int, measure: Callable[[int, int, int], list[float]]
) -> list[dict[str, Any]]:
    """`measure`: tokens, hidden size, blocks -> microseconds of a pair in all repeats."""
    results = []
    for tokens in TOKENS:
        # a launch has no more blocks than rows; 0: not ours to choose
        choices = sorted({min(blocks, tokens) for blocks in BLOCKS}) if name == "nvlink" else [0]
        for blocks in choices:
            times = measure(tokens, hidden, blocks)
            result = {
                "tokens": tokens,
                "blocks": blocks or None,
                "round_trip_us": statistics.median(times),
                "fastest_us": min(times),
                "bytes": _bytes(name, tokens, hidden),
                "least_bytes": tokens * (4 * hidden + 8 * TOP_K),
            }
            say(f"{name}: {json.dumps(result)}")
            results.append({**result, "all_us": times})
    return results


def _bytes(name: str, tokens: int, hidden: int) -> int | None:
    """What crosses between the GPUs, both ways; None where the kernels' source does not say."""
    if name == "nvlink":
        return tokens * (4 * hidden + 8 * TOP_K) + 16  # a flag each way
    if name == "deepep":
        # a header of 16 bytes before every row, and a counter of 4 bytes an expert each way
        return tokens * TOP_K * (4 * hidden + 16) + 8 * EXPERTS
    return None


def _two_gpus(transport: str, hidden: int) -> Any:
    """What the attention rank's process measures, or why there is nothing."""
    arguments = ("--transport", transport, "--hidden", str(hidden))
    return run_pair("benchmarks.transport", *arguments, seconds=BOUND)


def _measured_as(rank: int, name: str, hidden: int) -> list[dict[str, Any]]:
    """What one rank's process measures; the attention rank's times count."""

    def measure(tokens: int, hidden: int, blocks: int) -> list[float]:
        work = _work(name, rank, tokens, hidden, blocks)
        work()  # loads every kernel
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        graph = _capture(work, stream)
        times = []
        for _ in range(REPEATS):
            dist.barrier()
            times.append(_replay(graph, stream))
        return times

    return _sizes(name, hidden, measure)


def _work(name: str, rank: int, tokens: int, hidden: int, blocks: int) -> Callable[[], None]:
    if name == "deepep_v2":
        return _elastic(rank, tokens, hidden)
    transport = _join(name, rank, tokens, hidden, blocks)
    return _ask(transport, tokens, hidden) if rank == 0 else _answer(transport, tokens, hidden)


def _elastic(rank: int, tokens: int, hidden: int) -> Callable[[], None]:
    """DeepEP's second version as SGLang's ``deepep_v2`` decodes with it: expanded, no CPU sync."""
    from deep_ep import ElasticBuffer

    buffer = ElasticBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=tokens,
        hidden=hidden,
        num_topk=TOP_K,
        allow_hybrid_mode=False,
        prefer_overlap_with_compute=False,
        sl_idx=0,
    )
    rows = _rows(tokens if rank == 0 else 0, hidden)
    ids = rows.expert_ids + EXPERTS  # the second rank's, which is the FFN rank

    def work() -> None:
        received, _, weights, handle, _ = buffer.dispatch(
            rows.hidden,
            topk_idx=ids,
            topk_weights=rows.weights,
            num_experts=2 * EXPERTS,
            expert_alignment=128,
            do_cpu_sync=False,
            do_expand=True,
        )
        buffer.combine(received, handle=handle, topk_weights=weights)

    return work


def _join(name: str, rank: int, tokens: int, hidden: int, blocks: int) -> Transport:
    common: dict[str, Any] = {
        "topology": TOPOLOGY,
        "rank": rank,
        "num_experts": EXPERTS,
        "hidden_size": hidden,
        "top_k": TOP_K,
    }
    group = dist.group.WORLD
    if name == "deepep":
        from sglang_afd.dispatch.deepep import DeepEpTransport

        # its combine wants world x T to be a multiple of 4
        return DeepEpTransport(**common, cap=max(2, tokens), fp8=False, group=group)
    return NvlinkTransport(
        **common,
        dtype=torch.bfloat16,
        caps=Caps(tokens, 1),
        timeout=20.0,
        make_arena=lambda size: symmetric_arena(size, group),
        blocks=blocks,
    )


def _one_gpu(tokens: int, hidden: int, blocks: int) -> list[float]:
    """Both ends in this process, over ordinary memory."""
    memory: list[torch.Tensor] = []

    def make_arena(size: int) -> Arena:
        while len(memory) < 2:
            memory.append(torch.zeros(size, dtype=torch.uint8, device="cuda"))
        return Arena(memory[rank], tuple(arena.data_ptr() for arena in memory))

    ends = []
    for rank in range(2):
        ends.append(
            NvlinkTransport(
                topology=TOPOLOGY,
                rank=rank,
                num_experts=EXPERTS,
                hidden_size=hidden,
                top_k=TOP_K,
                dtype=torch.bfloat16,
                caps=Caps(tokens, 1),
                timeout=20.0,
                make_arena=make_arena,
                blocks=blocks,
            )
        )
    rows, round_ = _rows(tokens, hidden), _round(tokens)
    answer = _answer(ends[1], tokens, hidden)
    # each kernel is loaded before a stream waits for another
    handle = ends[0].dispatch(rows, round_)
    answer()
    ends[0].combine(handle)
    torch.cuda.synchronize()
    works = (answer, _ask(ends[0], tokens, hidden))
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    graphs = [_capture(work, stream) for work, stream in zip(works, streams, strict=True)]
    times = []
    for _ in range(REPEATS):
        with torch.cuda.stream(streams[0]):
            for _ in range(2):
                graphs[0].replay()
        times.append(_replay(graphs[1], streams[1]))
    return times


def _round(tokens: int) -> Round:
    return Round(Path.DECODE, 0, (tokens, 0))


def _rows(tokens: int, hidden: int) -> RoutedRows:
    generator = torch.Generator().manual_seed(1)
    return RoutedRows(
        torch.randn(tokens, hidden, generator=generator).bfloat16().cuda(),
        torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].cuda(),
        torch.rand(tokens, TOP_K, generator=generator).cuda(),
    )


def _ask(transport: Transport, tokens: int, hidden: int) -> Callable[[], None]:
    rows, round_ = _rows(tokens, hidden), _round(tokens)

    def work() -> None:
        transport.combine(transport.dispatch(rows, round_))

    return work


def _answer(transport: Transport, tokens: int, hidden: int) -> Callable[[], None]:
    round_ = _round(tokens)
    outputs = torch.randn(tokens, TOP_K, hidden, device="cuda").bfloat16()

    def work() -> None:
        batch, handle = transport.receive(round_)
        transport.reply(batch.hidden if isinstance(batch, MaskedBatch) else outputs, handle)

    return work


def _capture(work: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(PAIRS):
            work()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Microseconds of a pair, in a second replay: the first one brings the ranks together."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        graph.replay()
        began.record()
        graph.replay()
        ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1000 / PAIRS


if __name__ == "__main__":
    main()
