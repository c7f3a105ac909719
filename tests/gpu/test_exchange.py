"""The exchange kernels on a GPU: bits, lanes in flight under delays, skew, and the bounded wait.

All ranks' ends run in one process on one GPU, each on a stream of its own: one GPU is enough.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from sglang_afd.dispatch.channel import Shape, Span
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.emulation import Emulation
from sglang_afd.kernels.flags import failure_of
from sglang_afd.topology import Topology
from tests.support.emulated import exchange_of_sources
from tests.support.local_ends import Ends, expected, make_ends, random_rows, run_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = int(os.environ.get("SEED", random.randrange(2**31)))
ROUNDS = int(os.environ.get("ROUNDS", 10_000))


@pytest.fixture(autouse=True)
def say_seed() -> None:
    print(f"SEED={SEED}")


def run_in_turn(ends: Ends, rows: list[RoutedRows]) -> list[torch.Tensor]:
    """One exchange of all ranks on one stream, so that nothing waits.

    It also loads every kernel: where both roles are one process, loading one waits for the streams.
    """
    cap = ends.shape.cap
    sent = [end.dispatch(rows[i], slots=cap) for i, end in enumerate(ends.attention)]
    for index in range(len(ends.ffn)):
        serve(ends, index, [Span(0, len(ends.attention), cap)])
    results = [end.combine(handle) for end, handle in zip(ends.attention, sent, strict=True)]
    torch.cuda.synchronize()
    return results


def run_at_once(ends: Ends, rows: list[RoutedRows]) -> list[torch.Tensor]:
    """One exchange of all ranks, each on its own stream."""
    cap = ends.shape.cap
    start = torch.cuda.current_stream().record_event()
    results: list[torch.Tensor] = []
    streams = [torch.cuda.Stream() for _ in range(ends.topology.world_size)]
    for stream in streams:
        stream.wait_event(start)
    for index in range(len(ends.ffn)):
        with torch.cuda.stream(streams[len(ends.attention) + index]):
            serve(ends, index, [Span(0, len(ends.attention), cap)])
    for index, end in enumerate(ends.attention):
        with torch.cuda.stream(streams[index]):
            results.append(end.combine(end.dispatch(rows[index], slots=cap)))
    torch.cuda.synchronize()
    assert failure_of(ends.waits.failure) is None
    return results


def serve(ends: Ends, index: int, spans: list[Span]) -> None:
    """F rank `index` answers one exchange."""
    end = ends.ffn[index]
    batch = end.receive(spans)
    first = index * ends.num_experts // len(ends.ffn)
    end.reply(run_experts(batch.hidden, batch.expert_ids + first), spans)


@pytest.mark.parametrize("hidden", [16, 256, 2048, 2880, 4096, 7168])
@pytest.mark.parametrize(
    ("attention", "ffn", "top_k"), [(1, 1, 8), (2, 1, 4), (1, 2, 16), (2, 2, 1), (3, 2, 5)]
)
def test_bits_equal_the_reference(attention: int, ffn: int, top_k: int, hidden: int) -> None:
    draw = random.Random(SEED)
    ends = make_ends(
        Topology(attention, ffn), 32, Shape(64, hidden, top_k, torch.bfloat16), device="cuda"
    )
    for counts in ([0] * attention, [1] * attention, [64] * attention, [64, 0, 3][:attention]):
        rows = [random_rows(draw, count, ends.shape, 32, "cuda") for count in counts]
        wanted = [expected(sent, 32, ffn) for sent in rows]
        for run in (run_in_turn, run_at_once):
            for got, want in zip(run(ends, rows), wanted, strict=True):
                assert torch.equal(got, want)


def test_a_block_path_takes_only_sources_with_rows() -> None:
    draw = random.Random(SEED)
    ends = make_ends(Topology(3, 1), 8, Shape(512, 128, 4, torch.bfloat16), device="cuda")
    for counts in ([512, 0, 7], [0, 300, 0], [1, 1, 512]):
        rows = [random_rows(draw, count, ends.shape, 8, "cuda") for count in counts]
        spans = [Span(source, 1, count) for source, count in enumerate(counts) if count]
        sent = {
            span.first: ends.attention[span.first].dispatch(rows[span.first], slots=span.rows_each)
            for span in spans
        }
        serve(ends, 0, spans)
        for source, handle in sent.items():
            got = ends.attention[source].combine(handle)
            assert torch.equal(got, expected(rows[source], 8, 1))


@pytest.mark.parametrize("hidden", [16, 2048, 2880, 4096, 7168])
@pytest.mark.parametrize(
    ("attention", "ffn", "tp"), [(3, 1, 1), (1, 2, 1), (12, 4, 1), (2, 2, 2)], ids=str
)
def test_emulated_ranks_send_rows_of_their_own(
    attention: int, ffn: int, tp: int, hidden: int
) -> None:
    emulation = Emulation(Topology(1, 1, tp), Topology(attention, ffn, tp))
    shape = Shape(64, hidden, 8, torch.bfloat16)
    exchange_of_sources(emulation, shape, per_rank=16, lanes=2, device="cuda")


def skewed(ends: Ends, lane: int) -> Callable[[int, torch.Tensor], None]:
    """Change an A rank's ids in place, lane by lane: even, all to one expert, a silent rank."""

    def change(rank: int, ids: torch.Tensor) -> None:
        if lane % 3 == 1:
            ids.zero_()
            ids[:, 1:] = -1
        elif lane % 3 == 2 and rank == 0:
            ids.fill_(-1)

    return change


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_lanes_in_flight_under_random_delays(lanes: int) -> None:
    """Captured exchanges of several lanes, replayed without any order between the lanes."""
    draw = random.Random(SEED + lanes)
    topology, experts, captured = Topology(2, 2), 16, 20
    shape = Shape(48, 256, 4, torch.bfloat16)
    graphs: list[tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]] = []
    wrong = []
    kept = []
    for lane in range(lanes):
        ends = make_ends(topology, experts, shape, device="cuda", seconds=20)
        kept.append(ends)
        # every kernel is loaded before a stream waits
        run_in_turn(ends, [random_rows(draw, 48, shape, experts, "cuda") for _ in range(2)])
        change = skewed(ends, lane)
        for rank, end in enumerate(ends.attention):
            hidden = torch.randn(48, 256, device="cuda").bfloat16()
            ids = torch.rand(48, experts, device="cuda").argsort(dim=1)[:, :4].contiguous()
            change(rank, ids)
            weights = torch.rand(48, 4, device="cuda")
            bad = torch.zeros(1, dtype=torch.int64, device="cuda")
            wrong.append(bad)
            kept.append((hidden, ids, weights))

            def attention(
                end=end, hidden=hidden, ids=ids, weights=weights, bad=bad, count=captured
            ) -> None:
                for _ in range(count):
                    hidden.copy_((hidden.float().roll(1, 1) * 1.0009765625).bfloat16().clamp(-9, 9))
                    ids.copy_(ids.roll(1, 0))
                    torch.cuda._sleep(draw.choice((0, 0, 10_000, 80_000)))
                    rows = RoutedRows(hidden, ids, weights)
                    sent = end.dispatch(rows, slots=48)
                    torch.cuda._sleep(draw.choice((0, 0, 5_000)))
                    got = end.combine(sent)
                    bad.add_((got != expected(rows, experts, 2)).sum())

            graphs.append(record(attention))
        for index in range(2):

            def ffn(ends=ends, index=index, count=captured) -> None:
                for _ in range(count):
                    torch.cuda._sleep(draw.choice((0, 0, 10_000, 80_000)))
                    serve(ends, index, [Span(0, 2, 48)])

            graphs.append(record(ffn))
    for _ in range(ROUNDS // captured):
        order = list(graphs)
        draw.shuffle(order)
        for stream, graph in order:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert [int(bad) for bad in wrong] == [0] * len(wrong)


def record(work: Callable[[], None]) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """Capture `work` on a stream of its own."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        work()
    return stream, graph


_LONELY = """
import torch
from sglang_afd.dispatch.channel import Shape, Span
from sglang_afd.kernels.flags import failure_of
from sglang_afd.topology import Topology
from tests.support.local_ends import make_ends, random_rows
import random
ends = make_ends(Topology(1, 2), 8, Shape(8, 64, 2, torch.bfloat16), device="cuda", seconds=2)
end = ends.attention[0]
sent = end.dispatch(random_rows(random.Random(1), 8, ends.shape, 8, "cuda"), slots=8)
ends.ffn[1].receive([Span(0, 1, 8)])
ends.ffn[1].reply(torch.zeros(8, 2, 64, device="cuda").bfloat16(), [Span(0, 1, 8)])
try:
    end.combine(sent)
    torch.cuda.synchronize()
except Exception as error:
    print("trapped:", type(error).__name__)
print("failure:", failure_of(ends.waits.failure))
"""


def test_a_wait_gives_up_within_its_bound_and_names_the_peer() -> None:
    """In a process of its own: the trap ends its use of the GPU."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _LONELY], capture_output=True, text=True, timeout=60
    )
    assert "trapped:" in done.stdout, done.stdout + done.stderr
    assert "failure: Failure(peer=0, exchange=1)" in done.stdout, done.stdout + done.stderr
    assert time.monotonic() - began < 45
