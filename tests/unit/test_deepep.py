"""The `deepep` transport over a fake `deep_ep`: slots, empty ranks, weights, and its memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch

from sglang_afd.dispatch import deepep
from sglang_afd.dispatch.buffers import deepep_cap
from sglang_afd.dispatch.deepep import DeepEpTransport
from sglang_afd.dispatch.step_plan import Path, Round
from sglang_afd.dispatch.transport import MaskedBatch, RoutedRows
from sglang_afd.topology import Topology
from tests.support.fake_deep_ep import Buffer, Network
from tests.support.seeds import fresh_seed

pytestmark = pytest.mark.unit

H, K, CAP = 256, 4, 5


class _CpuTorch:
    """torch, with the CPU in the place of CUDA devices."""

    class cuda:
        current_device = staticmethod(lambda: 0)

    device = staticmethod(lambda *_: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Network, list[Any]]]:
    """``connect(topology, experts, fp8=…)``: a fake network and every rank's transport on it."""

    def run(
        topology: Topology, experts: int, *, fp8: bool = False
    ) -> tuple[Network, list[DeepEpTransport]]:
        network = Network(topology.world_size)
        monkeypatch.setitem(sys.modules, "deep_ep", network.module)
        monkeypatch.setattr(deepep, "torch", _CpuTorch())
        monkeypatch.setenv("NVSHMEM_QP_DEPTH", "1024")
        return network, [
            DeepEpTransport(
                topology=topology,
                rank=rank,
                num_experts=experts,
                hidden_size=H,
                top_k=K,
                cap=CAP,
                fp8=fp8,
                group=rank,
            )
            for rank in range(topology.world_size)
        ]

    return run


def expert(number: int, hidden: torch.Tensor) -> torch.Tensor:
    """An expert that no other one equals: mixes the row's elements, depends on its number."""
    return hidden.roll(number + 1, dims=-1) * (1 + number / 8) - number


def random_rows(count: int, experts: range, generator: torch.Generator) -> RoutedRows:
    """Rows of distinct experts out of `experts`, a quarter of the places empty."""
    order = torch.stack(
        [torch.randperm(len(experts), generator=generator)[:K] for _ in range(count)]
        or [torch.empty(K, dtype=torch.int64)]
    )[:count]
    ids = order + experts.start
    ids[torch.rand(ids.shape, generator=generator) < 0.25] = -1
    return RoutedRows(
        torch.randn(count, H, generator=generator).bfloat16(),
        ids.to(torch.int32),
        torch.rand(count, K, generator=generator),
    )


def one_round(
    topology: Topology,
    transports: list[Any],
    experts: int,
    sent: list[RoutedRows],
) -> tuple[list[torch.Tensor], list[MaskedBatch]]:
    """All ranks' parts of one round: what A ranks get, and what F ranks received."""
    counts = [rows.hidden.shape[0] for rows in sent] + [0] * len(topology.ffn_world)
    round_ = Round(Path.DECODE, 0, tuple(counts))

    def attention(rank: int) -> torch.Tensor:
        return transports[rank].combine(transports[rank].dispatch(sent[rank], round_))

    def ffn(rank: int) -> MaskedBatch:
        batch, handle = transports[rank].receive(round_)
        rows = batch.hidden.float()
        if batch.scales is not None:
            rows = rows * batch.scales.repeat_interleave(128, dim=-1)
        output = torch.full(rows.shape, torch.nan)
        for local, number in enumerate(topology.experts_of(rank, experts)):
            valid = slice(int(batch.counts[local]))
            output[local, valid] = expert(number, rows[local, valid])
        transports[rank].reply(output.bfloat16(), handle)
        return batch

    with ThreadPoolExecutor(topology.world_size) as threads:
        parts = [
            threads.submit(attention if rank in topology.attention_world else ffn, rank)
            for rank in range(topology.world_size)
        ]
    errors = [part.exception() for part in parts]
    for error in errors:
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error  # the others only waited for this rank
    results: list[Any] = [part.result() for part in parts]
    return results[: len(topology.attention_world)], results[len(topology.attention_world) :]


def reference(rows: RoutedRows) -> torch.Tensor:
    total = torch.zeros(rows.hidden.shape)
    for row in range(rows.hidden.shape[0]):
        for number, weight in zip(rows.expert_ids[row].tolist(), rows.weights[row], strict=True):
            if number >= 0:
                total[row] += weight * expert(number, rows.hidden[row].float())
    return total


WORLDS = [
    (Topology(1, 1), 8),
    (Topology(2, 1), 8),
    (Topology(1, 2), 8),
    (Topology(3, 2), 12),
    (Topology(1, 1, attention_tp=2), 8),
]


@pytest.mark.parametrize(("topology", "experts"), WORLDS, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_rounds_give_the_weighted_sum_of_the_experts(
    connect: Any, topology: Topology, experts: int, fp8: bool
) -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    _, transports = connect(topology, experts, fp8=fp8)
    for round_ in range(4):
        sent = []
        for rank in topology.attention_world:
            count = (CAP, 0, 1, 3)[(rank + round_) % 4]  # full, idle, one, some
            ids = range(experts)
            if round_ == 3:  # all of one F rank
                ids = topology.experts_of(topology.ffn_world[-1], experts)
            sent.append(random_rows(count, ids, generator))
        results, batches = one_round(topology, transports, experts, sent)
        for rows, result in zip(sent, results, strict=True):
            assert (result.shape, result.dtype) == (rows.hidden.shape, torch.bfloat16)
            tolerance = 0.2 if fp8 else 0.05
            torch.testing.assert_close(
                result.float(), reference(rows), rtol=tolerance, atol=tolerance
            )
        all_ids = torch.cat([rows.expert_ids.flatten() for rows in sent])
        for rank, batch in zip(topology.ffn_world, batches, strict=True):
            owned = topology.experts_of(rank, experts)
            assert batch.counts.tolist() == [int((all_ids == number).sum()) for number in owned]
            assert (batch.scales is not None) == fp8


def test_rows_without_any_expert_give_zeros(connect: Any) -> None:
    topology = Topology(2, 1)
    _, transports = connect(topology, 8)
    generator = torch.Generator().manual_seed(fresh_seed())
    sent = [random_rows(3, range(8), generator), random_rows(2, range(8), generator)]
    sent[0].expert_ids.fill_(-1)
    results, _ = one_round(topology, transports, 8, sent)
    assert not results[0].any()
    assert results[1].any()


def test_slots_of_attention_ranks_stay_empty(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert e lies in slot A * ceil(E / F) + e; negative ids stay negative."""
    topology, experts = Topology(2, 2), 8
    _, transports = connect(topology, experts)
    seen: list[torch.Tensor] = []
    dispatch = Buffer.low_latency_dispatch

    def record(buffer: Any, x: Any, slots: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert args[:2] == (deepep_cap(topology, CAP), 4 * topology.world_size)
        if slots.numel():
            seen.append(slots)
        return dispatch(buffer, x, slots, *args, **kwargs)

    monkeypatch.setattr(Buffer, "low_latency_dispatch", record)
    ids = torch.tensor([[0, 3, -1, 7], [4, -1, -1, 5]], dtype=torch.int32)
    rows = RoutedRows(torch.ones(2, H).bfloat16(), ids, torch.ones(2, K))
    none = RoutedRows(rows.hidden[:0], ids[:0], rows.weights[:0])
    one_round(topology, transports, experts, [rows, none])
    assert [slots.tolist() for slots in seen] == [[[8, 11, -1, 15], [12, -1, -1, 13]]]


def test_strided_rows_and_half_precision_weights_are_taken(connect: Any) -> None:
    topology = Topology(1, 1)
    _, transports = connect(topology, 8)
    wide = random_rows(3, range(8), torch.Generator().manual_seed(fresh_seed()))
    hidden = torch.stack([wide.hidden, wide.hidden], dim=2)[:, :, 0]
    assert not hidden.is_contiguous()
    rows = RoutedRows(hidden, wide.expert_ids, wide.weights.bfloat16())
    results, _ = one_round(topology, transports, 8, [rows])
    torch.testing.assert_close(results[0].float(), reference(rows), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("counts", "expected"), [((0, 0), 1), ((2, 0), 1), ((3, 0), 2), ((5, 4), 5)]
)
def test_the_tiling_hint_is_the_mean_rows_of_an_expert(
    connect: Any, counts: tuple[int, int], expected: int
) -> None:
    topology = Topology(2, 1)
    _, transports = connect(topology, 8)
    generator = torch.Generator().manual_seed(fresh_seed())
    sent = [random_rows(count, range(8), generator) for count in counts]
    _, (batch,) = one_round(topology, transports, 8, sent)
    assert batch.expected == expected


def test_the_buffer_is_made_for_all_slots_and_the_queues_for_the_cap(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology, experts = Topology(2, 2), 8
    network, _ = connect(topology, experts)
    hint = Buffer.get_low_latency_rdma_size_hint(deepep_cap(topology, CAP), H, 4, 16)
    assert [(b.size, b.num_qps) for b in network.buffers] == [(hint, 4)] * 4
    assert os.environ["NVSHMEM_QP_DEPTH"] == "1024"
    monkeypatch.setattr(sys.modules[__name__], "CAP", 600)
    connect(topology, experts)
    assert os.environ["NVSHMEM_QP_DEPTH"] == str(2 * (608 + 1))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_samples_have_the_form_of_what_is_received(connect: Any, fp8: bool) -> None:
    topology = Topology(2, 1)
    _, transports = connect(topology, 8, fp8=fp8)
    generator = torch.Generator().manual_seed(fresh_seed())
    sent = [random_rows(3, range(8), generator), random_rows(2, range(8), generator)]
    _, (received,) = one_round(topology, transports, 8, sent)
    samples = list(transports[2].samples())
    assert samples
    memory = [part.data_ptr() for sample in samples for part in sample[:3] if part is not None]
    assert len(set(memory)) == len(memory), "kernels free what they are given"
    for sample in samples:
        for made, real in zip(sample[:3], received[:3], strict=True):
            assert (made is None) == (real is None)
            if made is not None:
                assert (made.shape, made.dtype) == (real.shape, real.dtype)


def test_a_cuda_error_is_told_from_others(connect: Any) -> None:
    _, transports = connect(Topology(1, 1), 8)
    assert transports[0].failure(ValueError("no such key")) is None
    meaning = transports[0].failure(RuntimeError("CUDA error: unspecified launch failure"))
    assert "attention rank 0" in meaning and "restart the deployment" in meaning
