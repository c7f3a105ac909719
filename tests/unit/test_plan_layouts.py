"""Rank allocation, modes, search, verdict and the gate's performance step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_afd import features
from sglang_afd.flags import parse
from sglang_afd.gate import findings
from sglang_afd.machine import Gpu, Machine
from sglang_afd.plan import advice, modes
from sglang_afd.plan.arrivals import prefill_seconds, serve
from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.layouts import layouts, split
from sglang_afd.plan.profile import read_profile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.search import Answer, Question, search
from sglang_afd.plan.shape import read_shape
from sglang_afd.plan.verdict import launch_command, verdict
from sglang_afd.plan.workload import Workload
from tests.support.gate_facts import GPUS, make_facts, write_model

pytestmark = pytest.mark.unit

SMALL, LARGE = read_shape("qwen3-30b-a3b"), read_shape("qwen3-235b-a22b-fp8")
H200 = read_profile("h200")


def _ask(**changes: object) -> Answer:
    question = Question(LARGE, H200, 8, Workload(8192, 512), Routing(128, 8))
    return search(dataclasses.replace(question, **changes))  # type: ignore[arg-type]


def test_split_by_value() -> None:
    assert split(8, 1, 1) == (4, 4)
    assert split(8, 3, 1) == (6, 2)
    assert split(8, 1e9, 0) == (7, 1)
    assert split(8, 0, 1e9) == (1, 7)


@given(world=st.integers(2, 5000), attention=st.floats(0, 1e6), ffn=st.floats(1e-3, 1e6))
def test_split_conserves_ranks(world: int, attention: float, ffn: float) -> None:
    ranks = split(world, attention, ffn)
    assert sum(ranks) == world and min(ranks) >= 1


def test_split_refuses_by_field() -> None:
    for world, attention, named in ((1, 1.0, "world"), (8, -1.0, "attention pressure")):
        with pytest.raises(PlanError, match=named):
            split(world, attention, 1.0)
    with pytest.raises(PlanError, match="both"):
        split(8, 0, 0)


@settings(deadline=None, max_examples=20)
@given(gpus=st.integers(1, 24), lanes=st.integers(1, 3))
def test_layouts_conserve_gpus(gpus: int, lanes: int) -> None:
    good, bad = layouts(SMALL, H200, Workload(1024), gpus, lanes=(lanes,))
    for layout in good:
        assert (layout.attention_ranks + layout.ffn_ranks) * layout.groups == gpus
        assert layout.attention_ranks >= 1 and layout.batch >= lanes
        assert (layout.ffn_ranks == 0) == (layout.kind == "colocated")
        for memory in filter(None, (layout.attention, layout.ffn)):
            assert memory.total <= H200.memory
    assert all(refused.reason for refused in bad)
    assert not {layout.name for layout in good} & {refused.name for refused in bad}


def test_refusals_have_their_reason() -> None:
    _, bad = layouts(LARGE, H200, Workload(8192), 8, transport="deepep")
    reasons = {refused.name: refused.reason for refused in bad}
    assert "divide" in reasons["5A3F"]
    assert "lacks" in reasons["7A1F"]
    assert "exceed" in reasons["EP1"]
    _, bad = layouts(LARGE, H200, Workload(8192), 16)
    assert "reach" in {refused.name: refused.reason for refused in bad}["12A4F"]
    wide = read_shape("qwen3.5-397b-a17b")
    _, bad = layouts(wide, read_profile("gb200"), Workload(8192), 8, transport="deepep")
    assert "slots" in {refused.name: refused.reason for refused in bad}["6A2F"]


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match="fit no layout"):
        search(Question(LARGE, H200, 1, Workload(8192), Routing(128, 8)))


def test_pareto_is_a_front() -> None:
    answer = _ask()
    front = answer.pareto()
    assert [c.step.tpot for c in front] == sorted(c.step.tpot for c in front)
    assert [c.per_gpu for c in front] == sorted(c.per_gpu for c in front)
    best = answer.best()
    assert best is not None and front[-1].per_gpu == best.per_gpu


def test_latency_target_is_kept() -> None:
    answer = _ask(tpot=0.025)
    assert answer.by_layout() and all(c.step.tpot <= 0.025 for c in answer.by_layout())
    nothing = verdict(_ask(tpot=1e-4))
    assert nothing.choice is None and "Nothing meets" in nothing.headline


def test_verdict_says_when_afd_does_not_pay_and_when_it_does() -> None:
    one_host = verdict(_ask())
    assert "does not pay" in one_host.headline and "EP8" in one_host.headline
    rack = verdict(
        _ask(gpu=read_profile("gb200"), gpus=32, transport="fused", load=Workload(16384))
    )
    assert rack.choice is not None and rack.choice.layout.kind == "afd"
    assert "pays" in rack.headline and "the fused transport" in rack.missing


def test_launch_command_is_parsed_by_the_launcher() -> None:
    answer = _ask(kinds=("afd",))
    chosen = answer.best()
    assert chosen is not None
    words = launch_command(answer, chosen, "/models/a b").split(" -m sglang_afd.launch_server ")
    import shlex

    command = parse(shlex.split(words[1]), transport="nvlink")
    assert command.config is not None
    assert command.config.attention_ranks == chosen.layout.attention_ranks
    assert command.config.lanes == chosen.step.lanes
    assert command.config.max_tokens_per_rank * chosen.step.lanes >= chosen.step.batch
    assert "/models/a b" in command.sglang_args


def test_modes_follow_the_capability_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert modes.contract("sync").lanes == (1,)
    assert min(modes.contract("async", design=True).lanes) > 1
    for name in ("CUDA graphs", "Speculative decoding"):
        for shown in ("", "a test"):
            rows = tuple(
                dataclasses.replace(row, test=shown) if row.name == name else row
                for row in features.FEATURES
            )
            monkeypatch.setattr(features, "FEATURES", rows)
            found = modes.contract("sync")
            assert (found.graphs if name == "CUDA graphs" else "verify" in found.stages) == bool(
                shown
            )
    for most, lanes in ((1, ()), (2, (2,)), (4, (2, 3, 4))):
        monkeypatch.setitem(modes.GPU_LANES, "nvlink", most)
        found = modes.contract("async")
        assert found.lanes == lanes and bool(found.stages) is bool(lanes)
        assert modes.contract("async", transport="fused").lanes == ()
    with pytest.raises(PlanError, match="--mode"):
        modes.contract("turbo")
    with pytest.raises(PlanError, match="capability table"):
        modes.served("telepathy")


def test_arrivals_are_deterministic_and_suffer_from_load() -> None:
    answer = _ask(kinds=("colocated",), tpot=0.06)
    chosen = answer.best()
    assert chosen is not None
    light, heavy = (serve(answer.question, chosen, rate=r, ttft_target=5.0) for r in (0.1, 50.0))
    assert serve(answer.question, chosen, rate=0.1, ttft_target=5.0) == light
    assert heavy.ttft[2] > light.ttft[2] and heavy.goodput < light.goodput
    assert light.tpot[0] <= light.tpot[1] <= light.tpot[2]
    assert light.ttft[0] >= prefill_seconds(answer.question, chosen) > 0.1
    with pytest.raises(PlanError, match="--rate"):
        serve(answer.question, chosen, rate=0.0)


BIG = {
    "hidden_size": 2048,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def test_gate_warns_and_never_refuses(tmp_path: Path) -> None:
    facts = make_facts(write_model(tmp_path / "m", **BIG), machine=GPUS)
    found = [f for f in findings(facts) if f.gate == "performance"]
    assert len(found) == 1 and found[0].passed
    assert "less than SGLang without AFD" in found[0].message
    assert "predicted best" in found[0].mend


def test_gate_is_silent_where_afd_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "LOSS", 1.0)
    facts = make_facts(write_model(tmp_path / "m", **BIG), machine=GPUS)
    found = [f for f in findings(facts) if f.gate == "performance"]
    assert found[0].mend == "" and "tokens/s/GPU" in found[0].message


def test_gate_has_no_performance_step_on_cpus_or_after_a_refusal(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", **BIG)
    assert "performance" not in {f.gate for f in findings(make_facts(model))}
    refused = make_facts(model, "--enable-lora", machine=GPUS)
    assert "performance" not in {f.gate for f in findings(refused)}


@pytest.mark.parametrize(
    ("machine", "flags", "changes"),
    [
        (Machine((Gpu("L40S", (9, 0)),) * 8, GPUS.packages), (), {}),
        (GPUS, ("--afd-attention-tp", "2"), {}),
        (GPUS, ("--context-length", "0"), {}),
        (GPUS, (), {"vocab_size": None}),
        (GPUS, ("--afd-ffn-ranks", "2"), {"num_hidden_layers": 400}),
    ],
)
def test_gate_survives_what_it_cannot_predict(
    tmp_path: Path, machine: Machine, flags: tuple[str, ...], changes: dict[str, object]
) -> None:
    model = write_model(tmp_path / "m", **{**BIG, **changes})
    said = advice.advise(make_facts(model, *flags, machine=machine))
    assert said is not None and said.message


def test_a_request_holds_prompt_output_and_drafts() -> None:
    load = Workload(1000, 24, width=4, accepted=2.0)
    assert load.request_bytes(SMALL) == (1000 + 24 + 3) * 98304
    assert load.held == 1012
    hybrid = read_shape("qwen3.5-397b-a17b")
    assert Workload(1).request_bytes(hybrid) == hybrid.kv_bytes(2) + hybrid.state_bytes
