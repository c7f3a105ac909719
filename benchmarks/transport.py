"""Round trip of the transports: dispatch and combine without experts, in a CUDA graph of 10 pairs.

    python -m benchmarks.transport --out FILE.json [--one-gpu]

One attention and one FFN rank, BF16 rows, top-8 of 128 experts that all lie on the FFN rank.  On
two GPUs each rank is a process with a GPU of its own, and `nvlink` is measured beside DeepEP's
low-latency kernels where they are installed.  With --one-gpu both ends of `nvlink` are streams of
one process on one GPU: that shows what the kernels and their launches cost, and nothing about
NVLink.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.progress import say
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
PAIRS = 10
REPEATS = 50
TOPOLOGY = Topology(1, 1)
BOUND = 300
"""Seconds for all sizes of one transport."""


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=File, required=True, help="where the record goes")
    parser.add_argument("--one-gpu", action="store_true", help="both ends on one GPU's streams")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _rank(args.rank, args.meet, args.transport, args.out)
        return
    results: dict[str, Any] = {}
    record = {"identity": environment.describe(), "one_gpu": args.one_gpu, "results": results}
    if args.one_gpu:
        results["nvlink"] = _sizes(_one_gpu)
    else:
        both = ("nvlink", "deepep") if importlib.util.find_spec("deep_ep") else ("nvlink",)
        for name in both:
            results[name] = _two_gpus(name)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


def _sizes(measure: Callable[[int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for hidden in HIDDEN:
        for tokens in TOKENS:
            results.append(measure(tokens, hidden))
            said = {key: value for key, value in results[-1].items() if key != "all_us"}
            say(json.dumps(said))
    return results


def _two_gpus(transport: str) -> Any:
    """What the attention rank's process measures, or why there is nothing."""
    with tempfile.TemporaryDirectory() as folder:
        out = File(folder) / "out.json"
        command = [
            *(sys.executable, "-m", "benchmarks.transport", "--out", str(out)),
            *("--meet", f"{folder}/meet", "--transport", transport, "--rank"),
        ]
        running = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        deadline = time.monotonic() + BOUND
        try:
            codes = [process.wait(max(1, deadline - time.monotonic())) for process in running]
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {BOUND} s"}
        finally:
            for process in running:
                process.kill()
        return {"failed": f"exit codes {codes}"} if any(codes) else json.loads(out.read_text())


def _rank(rank: int, meet: str, name: str, out: File) -> None:
    """One rank's process; the attention rank writes the times."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", f"file://{meet}", world_size=2, rank=rank, device_id=device
    )

    def measure(tokens: int, hidden: int) -> dict[str, Any]:
        transport = _join(name, rank, tokens, hidden)
        work = _ask(transport, tokens, hidden) if rank == 0 else _answer(transport, tokens, hidden)
        work()  # loads every kernel
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        graph = _capture(work, stream)
        times = []
        for _ in range(REPEATS):
            dist.barrier()
            times.append(_replay(graph, stream))
        return _times(tokens, hidden, times)

    results = _sizes(measure)
    if rank == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # DeepEP's and NVSHMEM's own ends are not what is measured


def _join(name: str, rank: int, tokens: int, hidden: int) -> Transport:
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
    )


def _one_gpu(tokens: int, hidden: int) -> dict[str, Any]:
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
            graphs[0].replay()
        times.append(_replay(graphs[1], streams[1]))
    return _times(tokens, hidden, times)


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
    """Microseconds of a pair."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        began.record()
        graph.replay()
        ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1000 / PAIRS


def _times(tokens: int, hidden: int, times: list[float]) -> dict[str, Any]:
    return {
        "hidden": hidden,
        "tokens": tokens,
        "round_trip_us": statistics.median(times),
        "fastest_us": min(times),
        "all_us": times,
        "least_bytes_to_ffn": tokens * (2 * hidden + 8 * TOP_K),
        "least_bytes_back": tokens * 2 * hidden,
    }


if __name__ == "__main__":
    main()
