"""What transports are expected to hold, against what was measured and what they allocate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.dispatch.buffers import Buffers, Rows, deepep, deepep_cap, gloo, nvlink
from sglang_afd.dispatch.channel import Shape, channel_bytes
from sglang_afd.dispatch.draws import draw
from sglang_afd.emulation import Emulation
from sglang_afd.topology import Topology
from tests.support.fake_deep_ep import Buffer

pytestmark = pytest.mark.unit

MEASURED = Path(__file__).parents[2] / "benchmarks/results/2026-11-30_one_gpu/deepep_memory.json"


def rows(**changes: int) -> Rows:
    given_ = {"num_experts": 128, "hidden_size": 4096, "top_k": 8, "itemsize": 2, "fp8": False}
    return Rows(**{**given_, "decode": 128, "block": 2048, **changes})  # type: ignore[arg-type]


def test_deepep_keeps_what_was_measured() -> None:
    """Every shape of the record, both roles: within a tenth, and never over it."""
    runs = json.loads(MEASURED.read_text())["runs"]
    assert len(runs) == 8
    for run in runs:
        shape = rows(num_experts=run["experts"], hidden_size=run["hidden"], decode=run["cap"])
        for held, measured in zip(deepep(Topology(1, 1), shape), run["measured"], strict=True):
            assert measured["transport"] <= 1.1 * held.kept
            assert held.kept <= 1.1 * measured["transport"]


def test_deepep_at_a_high_ratio_takes_gigabytes_of_an_attention_rank() -> None:
    """15A1F: 2048 slots of 128 rows, 33 KB each in the heap, and the rows and output of a round."""
    held = deepep(Topology(15, 1), rows())
    places = 2048 * 128
    assert held.attention.kept == (512 + 36) * 2**20 + 17 * 512 * 2**20 + places * 8192
    assert held.attention.passing == places * 8192
    assert held.ffn.passing == 2 * places * 8192
    fp8 = deepep(Topology(15, 1), rows(fp8=True))
    assert fp8.attention.passing == places * (4096 + 128)


@given(
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from([2048, 2560, 4096, 5120, 7168]),
    st.integers(1, 256),
)
def test_deepeps_heap_holds_its_hint(
    attention: int, ffn: int, per_rank: int, hidden_size: int, cap: int
) -> None:
    topology = Topology(attention, ffn)
    slots = per_rank * topology.world_size
    shape = rows(num_experts=per_rank * ffn, hidden_size=hidden_size, decode=cap)
    held = deepep(topology, shape)
    cap = deepep_cap(topology, cap)
    hint = Buffer.get_low_latency_rdma_size_hint(cap, hidden_size, topology.world_size, slots)
    assert hint <= held.ffn.kept <= hint + 1100 * 2**20
    assert held.attention.kept - held.ffn.kept == slots * cap * 2 * hidden_size


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 1024))
def test_deepep_carries_whole_tiles_of_an_experts_rows(attention: int, ffn: int, cap: int) -> None:
    """A GEMM that writes 128 rows at a time would else write into the next expert's."""
    topology = Topology(attention, ffn)
    carried = deepep_cap(topology, cap)
    assert cap <= carried <= cap + 127 and carried * topology.world_size % 128 == 0
    assert carried <= 1024


@given(
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([16, 256, 2880, 7168]),
    st.integers(1, 16),
    st.integers(1, 300),
    st.integers(1, 4096),
    st.integers(1, 4),
)
def test_nvlink_keeps_what_its_channels_take(
    attention: int, ffn: int, tp: int, hidden: int, top_k: int, decode: int, block: int, lanes: int
) -> None:
    """A decode channel for each lane, and one for bulk blocks."""
    topology = Topology(attention, ffn, tp)
    shape = rows(hidden_size=hidden, top_k=top_k, decode=decode, block=block, lanes=lanes)
    taken = sum(
        channel_bytes(topology, Shape(cap, hidden, top_k, torch.bfloat16))
        for cap in (*[decode] * lanes, block)
    )
    held = nvlink(topology, shape)
    assert held.attention.kept == held.ffn.kept
    assert taken <= held.ffn.kept < taken + 2 * 2**21


@given(st.integers(2, 16), st.integers(1, 4), st.integers(1, 3), st.integers(1, 64))
def test_nvlink_keeps_parts_and_draws_of_emulated_ranks(
    attention: int, ffn: int, lanes: int, decode: int
) -> None:
    """As many parts in decode channels as the whole has attention ranks; draws on A alone."""
    real, top_k = Topology(1, 1), 4
    emulation = Emulation(real, Topology(attention, ffn))
    shape = rows(hidden_size=256, top_k=top_k, decode=decode, block=64, lanes=lanes)
    held = nvlink(real, shape._replace(emulated=attention - 1))
    form = Shape(decode, 256, top_k, torch.bfloat16)
    taken = lanes * channel_bytes(emulation.served, form, attention)
    taken += channel_bytes(real, form._replace(cap=64))
    assert taken <= held.ffn.kept < taken + 2 * 2**21
    drawn = draw(emulation, 0, cap=decode, num_experts=8, top_k=top_k)
    assert held.attention.kept - held.ffn.kept == lanes * drawn.nbytes
    sources = rows(hidden_size=256, top_k=top_k, decode=attention * decode, block=64, lanes=lanes)
    outputs = nvlink(real, sources).ffn.passing
    assert outputs <= held.ffn.passing <= 2 * outputs  # and copies of rows of several sources


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_nvlink_keeps_what_was_measured(dtype: str) -> None:
    """Both ranks shared a GPU, so that each one's measurement holds what both of them took."""
    record = json.loads((MEASURED.parent / f"{dtype}-nvlink.json").read_text())
    shape = rows(num_experts=32, hidden_size=2048, top_k=4, fp8=dtype == "fp8")
    held = nvlink(Topology(1, 1), shape)
    for rank in record["afd"]["ranks"]:
        assert rank["buffer_bytes"] == 2 * held.ffn.kept


def test_gloo_keeps_nothing() -> None:
    held = gloo(Topology(2, 1), rows())
    assert held.attention.kept == held.ffn.kept == 0
    assert held.attention.passing > 2048 * 4096 * 2 and held.ffn.passing > held.attention.passing
    more = gloo(Topology(1, 1), rows(decode=2048, emulated=3))
    many = gloo(Topology(4, 1), rows(decode=2048))
    assert more.ffn == many.ffn and more.attention.passing > many.attention.passing


@pytest.mark.parametrize("transport", [gloo, nvlink])
def test_the_rounds_of_several_lanes_and_a_prefill_pass_through_at_once(
    transport: Callable[[Topology, Rows], Buffers],
) -> None:
    """One lane takes turns with prefills, so that the larger of the two counts."""
    topology = Topology(3, 1)
    one, three = (transport(topology, rows(lanes=lanes)) for lanes in (1, 3))
    decode_only = transport(topology, rows(block=1))
    for of_one, of_three, of_decode in zip(one, three, decode_only, strict=True):
        assert of_three.passing > of_one.passing
        assert of_one.passing == transport(topology, rows(decode=1))[one.index(of_one)].passing
        lanes_and_block = of_one.passing + 3 * of_decode.passing
        assert of_three.passing == pytest.approx(lanes_and_block, rel=0.01)
