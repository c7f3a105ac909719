"""The closed form and the simulator: values, properties, agreement, speed."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_afd.plan import kernels
from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.profile import read_profile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.shape import read_shape
from sglang_afd.plan.simulate import Noise, simulate, simulate_afd
from sglang_afd.plan.step import (
    Split,
    Stages,
    afd,
    afd_stages,
    cad,
    colocated,
    combine,
    exposed_seconds,
    ffn_hides,
)
from sglang_afd.plan.workload import Workload

pytestmark = pytest.mark.unit

SHAPE, GPU, LOAD = read_shape("qwen3-235b-a22b-fp8"), read_profile("h200"), Workload(8192)
ROUTING = Routing(SHAPE.experts, SHAPE.top_k)
TIMES = st.floats(0, 1e3)


@pytest.mark.parametrize(("budget", "exposed"), [(0, 12), (5, 7), (99, 4)])
def test_exposed_by_value(budget: float, exposed: float) -> None:
    assert exposed_seconds(4, 1, 6, 1, budget) == exposed


@given(a=TIMES, out=TIMES, f=TIMES, back=TIMES, budget=TIMES, more=TIMES)
def test_exposed_is_bounded(
    a: float, out: float, f: float, back: float, budget: float, more: float
) -> None:
    exposed = exposed_seconds(a, out, f, back, budget)
    assert a - 1e-6 <= exposed <= a + out + f + back + 1e-6
    assert exposed_seconds(a, out, f, back, budget + more) <= exposed + 1e-6


@pytest.mark.parametrize("field", ["attention", "out", "ffn", "back", "budget"])
def test_exposed_refuses_by_field(field: str) -> None:
    values = dict.fromkeys(["attention", "out", "ffn", "back", "budget"], 1.0)
    with pytest.raises(PlanError, match=field):
        exposed_seconds(**{**values, field: float("nan")})
    with pytest.raises(PlanError, match=field):
        exposed_seconds(**{**values, field: -1.0})


def _stages(a: float, f: float, x: float, layers: int = 20) -> Stages:
    each = np.ones(layers)
    return Stages(a * each, x * each, f * each, x * each, head=0.0, link=0.0)


DEPLOYMENT = {"attention_ranks": 3, "ffn_ranks": 2}


@settings(deadline=None, max_examples=40)
@given(
    a=st.floats(0.1, 10),
    f=st.floats(0.1, 10),
    x=st.floats(0, 3),
    lanes=st.integers(1, 4),
)
def test_simulator_agrees_with_the_closed_form(a: float, f: float, x: float, lanes: int) -> None:
    stages = _stages(a, f, x)
    expected = combine(stages, "afd", Split(**DEPLOYMENT, lanes=lanes, batch=8)).seconds
    found = simulate(stages, lanes=lanes, steps=12, **DEPLOYMENT).steps[4:].mean()
    assert found == pytest.approx(expected, rel=0.02)


@settings(deadline=None, max_examples=25)
@given(
    attention=st.integers(1, 16),
    ffn=st.sampled_from([1, 2, 4, 8]),
    lanes=st.integers(1, 3),
    batch=st.integers(8, 128),
)
def test_no_step_beats_the_floor(attention: int, ffn: int, lanes: int, batch: int) -> None:
    """Memory and FLOPs at their peaks, whatever overlaps."""
    split = Split(attention, ffn, lanes, batch)
    step = afd(SHAPE, GPU, ROUTING, LOAD, split)
    cache = batch * LOAD.held * SHAPE.kv_bytes(2) / GPU.bandwidth
    flops = 6 * attention * batch * SHAPE.top_k * SHAPE.hidden * SHAPE.intermediate
    experts = flops * SHAPE.moe_layers / ffn / GPU.fp8_flops
    assert step.seconds >= max(cache, experts)
    assert step.seconds >= max(step.ta, step.te) or lanes == 1
    serial = lanes * afd_stages(SHAPE, GPU, ROUTING, LOAD, split).path
    assert step.exposed <= step.seconds <= serial + 1e-9
    assert step.gpus == attention + ffn


def test_lanes_overlap_but_read_the_experts_again() -> None:
    """One lane is serial; two cost twice the expert reads (the rule of the design)."""
    one, two = (afd(SHAPE, GPU, ROUTING, LOAD, Split(12, 4, lanes, 64)) for lanes in (1, 2))
    assert one.seconds == pytest.approx(one.ta + one.te + one.exchange)
    assert two.seconds < one.seconds
    assert two.te > 1.5 * one.te


def test_rule_of_lanes() -> None:
    per_rank = SHAPE.routed_weight_bytes / 4
    assert ffn_hides(2, per_rank, GPU.bandwidth, 0.034)
    assert not ffn_hides(2, 2 * per_rank, GPU.bandwidth, 0.034)
    assert not ffn_hides(3, per_rank, GPU.bandwidth, 0.034)


@given(skew=st.floats(0, 2))
def test_skew_never_helps(skew: float) -> None:
    routing = dataclasses.replace(ROUTING, skew=skew)
    even, uneven = (
        kernels.expert_seconds(SHAPE, GPU, which, 2000, 4).max() for which in (ROUTING, routing)
    )
    assert uneven >= even * 0.999
    if skew == 0:
        assert uneven == even


def test_verify_width_reads_the_cache_once() -> None:
    wide = Workload(8192, width=4, accepted=2.5)
    plain = colocated(SHAPE, GPU, ROUTING, LOAD, ranks=4, batch=40)
    found = colocated(SHAPE, GPU, ROUTING, wide, ranks=4, batch=40)
    assert plain.seconds < found.seconds < 2 * plain.seconds
    assert found.per_gpu > plain.per_gpu
    with pytest.raises(PlanError, match="--accepted"):
        Workload(8192, width=2, accepted=3.0)


def test_cad_pays_at_few_attention_ranks_and_long_contexts_only() -> None:
    gb200, long = read_profile("gb200"), Workload(131072)

    def gain(nodes: int) -> float:
        split = Split(4 * nodes, 4, lanes=2, batch=6)
        given_ = (SHAPE, gb200, ROUTING, long, split)
        return afd(*given_).seconds / cad(*given_).seconds

    assert gain(1) > 1.05  # published: 1.19
    assert gain(15) < 1  # published: it loses


def test_cad_refuses_linear_attention() -> None:
    shape = read_shape("qwen3.5-397b-a17b")
    with pytest.raises(PlanError, match="linear attention"):
        cad(shape, GPU, Routing(shape.experts, shape.top_k), LOAD, Split(2, 2, lanes=1, batch=1))


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("attention_ranks", "attention ranks"),
        ("ffn_ranks", "FFN ranks"),
        ("lanes", "--lanes"),
        ("batch", "--batch"),
    ],
)
def test_a_split_refuses_by_field(field: str, named: str) -> None:
    good = Split(2, 2, lanes=1, batch=1)
    for bad in (0, -1, 10**8, float("nan")):
        with pytest.raises(PlanError, match=named):
            dataclasses.replace(good, **{field: bad})  # type: ignore[arg-type]


BIG = Split(56, 8, lanes=2, batch=64)


def test_64_ranks_simulate_in_under_a_second() -> None:
    noise = Noise(draws=True, straggle=0.05)
    began = time.process_time()
    found = simulate_afd(SHAPE, GPU, ROUTING, LOAD, BIG, steps=1, noise=noise)
    assert time.process_time() - began < 2.0  # two steps: the warm-up's too
    assert len(found.steps) == 1


def test_simulator_is_deterministic_by_seed() -> None:
    def run(seed: int) -> list[float]:
        noise = Noise(draws=True, straggle=0.05, seed=seed)
        return list(simulate_afd(SHAPE, GPU, ROUTING, LOAD, BIG, steps=2, noise=noise).steps)

    assert run(1) == run(1) != run(2)


def test_noise_costs_time() -> None:
    def run(**noise: object) -> float:
        return simulate_afd(SHAPE, GPU, ROUTING, LOAD, BIG, noise=Noise(**noise)).seconds  # type: ignore[arg-type]

    plain = run()
    assert plain == pytest.approx(afd(SHAPE, GPU, ROUTING, LOAD, BIG).seconds, rel=0.02)
    assert run(straggle=0.1) > plain
    assert run(host_gap=1e-3) == pytest.approx(plain + 1e-3, rel=0.02)
    assert run(barrier=True) >= plain
    assert run(draws=True) >= plain * 0.99


def test_a_lane_waits_for_the_slowest_rank_of_each_role() -> None:
    """So that stragglers cost more the more ranks there are."""

    def run(attention: int, ffn: int) -> float:
        return simulate(
            _stages(1.0, 1.0, 0.0),
            attention_ranks=attention,
            ffn_ranks=ffn,
            lanes=1,
            steps=50,
            noise=Noise(straggle=0.2),
        ).seconds

    assert run(64, 1) > 1.1 * run(1, 1)
    assert run(1, 64) > 1.1 * run(1, 1)


def test_verify_costs_flops_where_they_bind() -> None:
    shape = read_shape("deepseek-v3")
    one, four = (kernels.core_seconds(shape, GPU, 32, width, 8192, 2).sum() for width in (1, 4))
    assert four > 3 * one


def test_skewed_draws_are_slower_than_even_ones() -> None:
    skewed = Routing(SHAPE.experts, SHAPE.top_k, skew=1.0)
    slow, even = (
        simulate_afd(SHAPE, GPU, which, LOAD, BIG, noise=Noise(draws=True)).seconds
        for which in (skewed, ROUTING)
    )
    assert slow > even
