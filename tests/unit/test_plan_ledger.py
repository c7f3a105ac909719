"""The ledger by value and by property, shapes and routing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.plan import ledger
from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.profile import read_profile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.shape import read_shape, shape_of, shipped
from sglang_afd.topology import Topology

pytestmark = pytest.mark.unit

SIZES = {"tokens": st.integers(0, 4096), "layers": st.integers(0, 128)}


def test_activations_by_value() -> None:
    assert ledger.activation_bytes(tokens=8, hidden=16, layers=2, itemsize=2) == 1024


def test_router_on_attention_sends_ids_and_weights() -> None:
    assert ledger.routing_bytes(8, 2, 3, 2) == 8 * 2 * (4 + 2) * 3
    assert ledger.routing_bytes(8, 2, 3, 2, router_on_attention=False) == 0


@given(**SIZES, more=st.integers(1, 64), top_k=st.integers(0, 16))
def test_bytes_grow(tokens: int, layers: int, more: int, top_k: int) -> None:
    def moved(tokens: int, layers: int, top_k: int) -> int:
        rows = ledger.activation_bytes(tokens, 64, layers, 2)
        return rows + ledger.routing_bytes(tokens, top_k, layers, 2)

    now = moved(tokens, layers, top_k)
    assert moved(tokens + more, layers, top_k) >= now
    assert moved(tokens, layers + more, top_k) >= now
    assert moved(tokens, layers, top_k + more) >= now


@given(
    top_k=st.integers(1, 11),
    skew=st.floats(0, 2),
    owners=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_copies_of_a_token(top_k: int, skew: float, owners: int) -> None:
    """No fewer than one, no more than its experts or the ranks; all on one rank: one copy."""
    routing = Routing(128, top_k, skew)
    copies = float(routing.copies(owners).sum())
    assert 1 - 1e-9 <= copies <= min(owners, top_k) + 1e-9
    if owners == 1:
        assert copies == pytest.approx(1)


def test_distinct_ranks_of_top_8() -> None:
    assert float(Routing(128, 8).copies(4).sum()) == pytest.approx(3.6, abs=0.01)
    assert float(Routing(128, 8).copies(2).sum()) == pytest.approx(1.99, abs=0.01)


@given(skew=st.floats(0, 3), seed=st.integers(0, 9), owners=st.sampled_from([1, 2, 4, 8]))
def test_routing_is_a_distribution(skew: float, seed: int, owners: int) -> None:
    routing = Routing(64, 6, skew, seed)
    assert routing.inclusion().sum() == pytest.approx(6)
    assert routing.inclusion().max() <= 1 + 1e-6
    assert routing.share(owners).sum() == pytest.approx(1)
    touched = routing.touched(100, owners).sum()
    assert 6 <= touched <= 64
    assert touched >= routing.touched(10, owners).sum()


def test_no_skew_is_balanced() -> None:
    assert set(Routing(64, 6, 0.0).share(8)) == {1 / 8}
    assert Routing(64, 6, 1.0).share(8).max() > 1 / 8


def test_transports_differ_by_their_copies() -> None:
    shape = read_shape("qwen3-30b-a3b")
    routing = Routing(shape.experts, shape.top_k)
    one, eight = (ledger.travel(shape, name, routing, 1) for name in ("nvlink", "deepep"))
    assert eight.back == 8 * one.back == 8 * 2048 * 2
    step = ledger.step_travel(shape, one, 128)
    assert step.back == 128 * 48 * 4096
    with pytest.raises(PlanError, match="--transport"):
        ledger.travel(shape, "pigeon", routing, 1)


def test_fp8_rows_carry_scales() -> None:
    assert ledger.row_bytes(4096, 2, fp8=True) == 4096 + 32 * 4
    assert ledger.row_bytes(4096, 2, fp8=False) == 8192


PARAMETERS = {
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-235b-a22b-fp8": 235.1e9,
    "minimax-m2.5": 228.7e9,
    "qwen3.5-397b-a17b": 397e9,
    "deepseek-v3": 671e9,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_published_parameters(name: str) -> None:
    shape = read_shape(name)
    routed = shape.moe_layers * shape.experts * 3 * shape.hidden * shape.intermediate
    rest = sum(float(shape.each(field).sum()) for field in ("projections", "dense", "router"))
    total = routed + rest + 2 * shape.vocab * shape.hidden
    assert total == pytest.approx(PARAMETERS[name], rel=0.005)


def test_hybrid_and_latent_caches() -> None:
    assert read_shape("qwen3.5-397b-a17b").kv_bytes(2) == 15 * 2 * 2 * 256 * 2
    assert read_shape("qwen3.5-397b-a17b").state_bytes > 45 * 64 * 128 * 128 * 4
    assert read_shape("deepseek-v3").kv_bytes(2) == 61 * (512 + 64) * 2


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("field", [key for key in CONFIG if key != "num_key_value_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "x", 1.5, True, 10**12, [], {}])
def test_odd_configs_are_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=field):
        shape_of({**CONFIG, field: value})


def test_other_odd_configs() -> None:
    for change, named in (
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"mlp_only_layers": [0, 1], "intermediate_size": 8}, "routed experts"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ):
        with pytest.raises(PlanError, match=named):
            shape_of({**CONFIG, **change})


def test_memory_of_a_role_is_what_it_holds() -> None:
    shape, gpu = read_shape("qwen3-235b-a22b-fp8"), read_profile("h200")
    attention = ledger.attention_memory(shape, gpu)
    ffn = ledger.ffn_memory(shape, gpu, 4)
    both = ledger.colocated_memory(shape, gpu, 4)
    assert both.weights == attention.weights + ffn.weights
    assert attention.total == pytest.approx(gpu.memory * gpu.usable)
    buffers = ledger.transport_buffers(shape, "deepep", Topology(15, 1), 128)[0]
    assert buffers > 8 * 2**30  # as docs/gpu_runs.md warns


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "8", None, True, 2.5])
def test_invalid_input_names_its_field(value: Any) -> None:
    with pytest.raises(PlanError, match="tokens"):
        ledger.activation_bytes(value, 16, 2, 2)
    with pytest.raises(PlanError, match="top_k"):
        Routing(8, value)


def test_every_shipped_config_is_sourced() -> None:
    text = (ledger.__file__ and read_shape.__globals__["SHIPPED"] / "SOURCES.md").read_text()
    for name in shipped():
        assert f"`{name}.json`" in text
