"""Emulated ranks: who they are, what they draw, what is refused, and how all of it is marked.

tests/unit/exchange_in_interpreter.py runs the kernels that send their rows.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd import engine, start
from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.context import RankContext
from sglang_afd.dispatch import draws
from sglang_afd.dispatch.draws import draw
from sglang_afd.dispatch.step_plan import Caps, Round, StepKind, StepPlan
from sglang_afd.dispatch.step_plan import Path as RowPath
from sglang_afd.emulation import DRAWS, Emulation
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.flags import parse
from sglang_afd.gate import findings
from sglang_afd.kernels import flags
from sglang_afd.kernels.exchange_reference import drawn_ids
from sglang_afd.observe.stages import HostClock, Stage, StepTimer, StepTimes
from sglang_afd.plan.advice import advise
from sglang_afd.topology import Topology, TopologyError
from tests.support.gate_facts import GPUS, make_facts, refused, write_model
from tests.support.local_ends import make_transports

pytestmark = pytest.mark.unit

MARK = "--afd-emulation-is-not-the-model"
ONE = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")
FACTS = MoeFacts((1, 3), num_experts=8, top_k=2, hidden_size=4, intermediate_size=6)


def emulate(attention: int, ffn: int, tp: int = 1) -> Emulation:
    return Emulation(Topology(1, 1, tp), Topology(attention, ffn, tp))


@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(0, 5), st.integers(0, 3), st.integers(1, 3)
)
def test_every_source_has_one_host_and_every_present_expert_one_owner(
    attention: int, ffn: int, more_attention: int, more_ffn: int, tp: int
) -> None:
    real = Topology(attention, ffn, tp)
    whole = Topology(attention + more_attention, ffn + more_ffn, tp)
    emulation = Emulation(real, whole)
    assert emulation.active == bool(more_attention or more_ffn)
    assert (emulation.described() is None) is not emulation.active
    hosted = [
        source for rank in real.attention_world for source in (rank, *emulation.emulated_by(rank))
    ]
    assert sorted(hosted) == list(whole.attention_world) == list(emulation.served.attention_world)
    for rank in real.attention_world:
        assert emulation.is_real(rank) and emulation.name_of(rank) == real.name_of(rank)
        for source in emulation.emulated_by(rank):
            assert emulation.host_of(source) == rank and not emulation.is_real(source)
            assert real.name_of(rank) in emulation.name_of(source) != real.name_of(rank)
    experts = 2 * len(whole.ffn_world)
    owned = [e for rank in real.ffn_world for e in emulation.experts_of(rank, experts)]
    assert owned == list(range(emulation.present_experts(experts)))
    assert len(owned) == experts * ffn // whole.ffn_ranks
    with pytest.raises(TopologyError, match="owns no experts"):
        emulation.experts_of(0, experts)


def test_draws_are_uniform_distinct_and_each_lanes_and_ranks_own() -> None:
    """Also independent: how often two experts meet in a row is what chance makes it."""
    emulation, experts, top_k, cap = emulate(5, 4, tp=2), 16, 4, 100
    drawn = draw(emulation, 0, cap=cap, num_experts=experts, top_k=top_k)
    assert drawn.shape == (DRAWS, 4, cap, top_k) and drawn.dtype is torch.int32
    rows = drawn.flatten(0, 2).long()
    assert all(len(set(row)) == top_k for row in rows.tolist())
    chosen = torch.zeros(rows.shape[0], experts).scatter_(1, rows, 1.0)
    count, share = rows.shape[0], top_k / experts
    sigma = (count * share * (1 - share)) ** 0.5
    assert (chosen.sum(0) - count * share).abs().max() < 5 * sigma
    pairs = (chosen.T @ chosen)[torch.triu_indices(experts, experts, 1).unbind()]
    together = count * share * (top_k - 1) / (experts - 1)
    assert (pairs - together).abs().max() < 5 * together**0.5
    follow = (chosen[1:].T @ chosen[:-1]) / count  # rows do not depend on the rows before them
    assert (follow - share**2).abs().max() < 5 * (share**2 / count) ** 0.5
    again = draw(emulation, 0, cap=cap, num_experts=experts, top_k=top_k)
    assert torch.equal(again, drawn)
    for other in ({"rank": 1}, {"rank": 0, "lane": 1}):
        theirs = draw(emulation, cap=cap, num_experts=experts, top_k=top_k, **other)
        assert (theirs == drawn).float().mean() < 2 / experts


def test_emulated_rows_are_as_many_as_the_real_ones() -> None:
    real = torch.tensor([[3, -1], [-1, -1], [7, 0]])
    drawn = torch.arange(2 * 5 * 2).view(2, 5, 2)
    ids = drawn_ids(real, drawn)
    assert (ids >= 0).all(dim=2).tolist() == [[True, False, True, False, False]] * 2
    assert torch.equal(ids[:, [0, 2]], drawn[:, [0, 2]])
    assert (drawn_ids(real[:0], drawn) == -1).all()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--afd-emulate-attention-ranks", "3"), f"say that this is wanted with {MARK}"),
        (("--afd-emulate-ffn-ranks", "2"), f"say that this is wanted with {MARK}"),
        ((MARK,), "but nothing is emulated; leave it out"),
        (("--afd-emulate-attention-ranks", "1", MARK), "counts the real rank too and must be 2"),
        (("--afd-emulate-ffn-ranks", "0", MARK), "--afd-emulate-ffn-ranks is 0"),
        (("--afd-emulate-ffn-ranks", "5000", MARK), "must be 2 to 4096"),
        (
            ("--afd-attention-ranks", "2", "--afd-emulate-attention-ranks", "3", MARK),
            "stands on one attention and one FFN rank, not on 2 and 1",
        ),
        (("--afd-ffn-ranks", "2", "--afd-emulate-ffn-ranks", "4", MARK), "not on 1 and 2"),
    ],
)
def test_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([*ONE, *flags], transport="gloo")
    assert says in str(error.value)


def test_flags_reach_the_ranks() -> None:
    flags = ("--afd-emulate-attention-ranks", "12", "--afd-emulate-ffn-ranks", "4", MARK)
    command = parse([*ONE, *flags], transport="nvlink")
    config = command.config
    assert config is not None and AfdConfig.from_json(config.to_json()) == config
    assert config.topology == Topology(1, 1) and config.emulation.whole == Topology(12, 4)
    # SGLang's world is the real one
    assert command.sglang_args[:4] == ["--tp-size", "2", "--attn-dp-size", "2"]
    plain = parse(ONE, transport="nvlink").config
    assert plain is not None and not plain.emulation.active
    assert plain.agreement() != config.agreement(), "ranks that differ in it must not meet"


def test_the_engine_takes_the_switch() -> None:
    argv = engine.to_argv({"afd_emulation_is_not_the_model": True, "afd_emulate_ffn_ranks": 2})
    assert argv == [MARK, "--afd-emulate-ffn-ranks", "2"]
    assert engine.to_argv({"afd_emulation_is_not_the_model": False}) == []
    with pytest.raises(start.Refused, match="wanted with afd_emulation_is_not_the_model"):
        engine.Engine(
            afd_attention_ranks=1,
            afd_ffn_ranks=1,
            afd_emulate_ffn_ranks=2,
            afd_emulation_is_not_the_model=False,
        )


def test_gates(tmp_path: Path) -> None:
    """Experts divide over the whole's FFN ranks; deepep is refused by name; all is said."""
    model = write_model(tmp_path)
    both = ("--afd-emulate-attention-ranks", "12", "--afd-emulate-ffn-ranks", "4", MARK)
    [passed] = [f for f in findings(make_facts(model, *both)) if f.gate == "topology"]
    assert "measured as 12 attention and 4 FFN DP ranks: answers are NOT the model's" in (
        passed.message
    )
    assert "4 experts of a layer on each FFN rank" in passed.message
    uneven = make_facts(model, "--afd-emulate-ffn-ranks", "3", MARK)
    [text] = refused(uneven, "topology")
    assert "16 experts do not divide over 3 FFN ranks (--afd-emulate-ffn-ranks 3 x" in text
    deepep = make_facts(model, *both, "--afd-transport", "deepep", machine=GPUS)
    assert any("deepep emulates no ranks" in text for text in refused(deepep, "transport"))
    nvlink = make_facts(model, *both, "--afd-transport", "nvlink", machine=GPUS)
    assert not refused(nvlink, "transport")
    named = dataclasses.replace(GPUS.gpus[0], name="NVIDIA H200", memory=141 * 2**30)
    machine = dataclasses.replace(GPUS, gpus=(named,) * 2)
    advice = advise(make_facts(model, *both, "--afd-transport", "nvlink", machine=machine))
    assert advice is not None and advice.message == "not predicted: ranks are emulated"


def test_a_rank_knows_what_it_owns() -> None:
    config = AfdConfig(attention_ranks=1, ffn_ranks=1, emulated_ffn_ranks=4)
    context = RankContext(config, 1, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {})
    assert context.own_slots == range(2)
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    assert [context.loads_tensor(name.format(expert)) for expert in range(3)] == [True, True, False]


def test_an_ffn_ranks_timer_counts_the_rows_of_all_sources() -> None:
    plan = StepPlan(0, (StepKind.DECODE, StepKind.IDLE), (5, 0), Caps(8, 16))
    for path, rows in ((RowPath.DECODE, 15), (RowPath.BULK, 5)):
        timer = StepTimer(Stage.EXPERTS, HostClock, rank=None, experts=1, sources=3)
        told: list[StepTimes] = []
        timer.subscribe(told.append)
        with timer.step(plan, (Round(path, 0, (5, 0)),)):
            pass
        assert [times.rows for times in told] == [rows]


def test_a_missing_source_is_named_with_the_rank_that_stands_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draws, "DRAWS", 1)
    from sglang_afd.dispatch.channel import Shape

    transports = make_transports(
        Topology(1, 1), 4, Shape(2, 16, 1, torch.float32), Caps(2, 2), 1, emulation=emulate(3, 2)
    )
    failing = flags.Failure(2, 7)
    monkeypatch.setattr("sglang_afd.dispatch.nvlink.failure_of", lambda failure: failing)
    said = transports[1].failure(RuntimeError())
    assert said is not None
    assert "for emulated source 2 of attention rank 0 (world rank 0) in exchange 7" in said


def test_the_mark_says_what_is_stood_for() -> None:
    mark: Any = msgspec.to_builtins(emulate(12, 4).described())
    assert (mark["attention_ranks"], mark["ffn_ranks"]) == (12, 4)
    assert mark["straggler_spread_us"] == 0 and "seed" in mark["routing"]
    assert "not the model's" in mark["note"]
