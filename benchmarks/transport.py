"""Round trip of the transports: dispatch and combine without experts, in a CUDA graph of 10 pairs.

    python -m benchmarks.transport --out FILE.json [--one-gpu]

One attention and one FFN rank, BF16 rows, top-8 of 128 experts that all lie on the FFN rank.  On
two GPUs each rank is a process with a GPU of its own, and `nvlink` is measured beside DeepEP's
low-latency kernels where they are installed.  With --one-gpu both ends are streams of one process
on one GPU: that shows what the kernels and their launches cost, and nothing about NVLink.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.progress import say
from sglang_afd.dispatch.channel import (
    Arena,
    AttentionEnd,
    FfnEnd,
    Shape,
    Span,
    Waits,
    channel_bytes,
)
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.topology import Topology
from sglang_afd.validate import environment

TOKENS = (1, 16, 64, 128, 256, 512)
HIDDEN = (2048, 4096)
EXPERTS, TOP_K = 128, 8
PAIRS = 10
REPEATS = 50
TOPOLOGY = Topology(1, 1)


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    parser.add_argument("--one-gpu", action="store_true", help="both ends on one GPU's streams")
    args = parser.parse_args()
    results = []
    for hidden in HIDDEN:
        for tokens in TOKENS:
            results.append(_one_gpu(tokens, hidden))
            say(json.dumps(results[-1]))
    record = {"identity": environment.describe(), "one_gpu": args.one_gpu, "results": results}
    args.out.write_text(json.dumps(record, indent=1) + "\n")


def _one_gpu(tokens: int, hidden: int) -> dict[str, Any]:
    shape = Shape(tokens, hidden, TOP_K, torch.bfloat16)
    size = channel_bytes(TOPOLOGY, shape)
    memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    addresses = tuple(arena.data_ptr() for arena in memory)
    waits = Waits(torch.zeros(2, dtype=torch.int64, pin_memory=True), 10.0)
    attention = AttentionEnd(TOPOLOGY, 0, EXPERTS, shape, Arena(memory[0], addresses), 0, waits)
    ffn = FfnEnd(TOPOLOGY, 1, shape, Arena(memory[1], addresses), 0, waits)
    generator = torch.Generator().manual_seed(1)
    rows = RoutedRows(
        torch.randn(tokens, hidden, generator=generator).bfloat16().cuda(),
        torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].cuda(),
        torch.rand(tokens, TOP_K, generator=generator).cuda(),
    )
    outputs = torch.randn(tokens, TOP_K, hidden, device="cuda").bfloat16()
    spans = [Span(0, 1, tokens)]

    def ask() -> None:
        attention.combine(attention.dispatch(rows, slots=tokens))

    def answer() -> None:
        ffn.receive(spans)
        ffn.reply(outputs, spans)

    # each kernel is loaded before a stream waits for another
    handle = attention.dispatch(rows, slots=tokens)
    answer()
    attention.combine(handle)
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    graphs = [_capture(work, stream) for work, stream in zip((answer, ask), streams, strict=True)]
    times = []
    for _ in range(REPEATS):
        with torch.cuda.stream(streams[0]):
            graphs[0].replay()
        with torch.cuda.stream(streams[1]):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graphs[1].replay()
            ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1000 / PAIRS)
    return {
        "hidden": hidden,
        "tokens": tokens,
        "round_trip_us": statistics.median(times),
        "fastest_us": min(times),
        "all_us": times,
        "bytes_to_ffn": tokens * (2 * hidden + 8 * TOP_K),
        "bytes_back": tokens * 2 * hidden,
    }


def _capture(work: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(PAIRS):
            work()
    return graph


if __name__ == "__main__":
    main()
