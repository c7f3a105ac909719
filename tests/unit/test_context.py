"""`RankContext`: a rank's steps, and which checkpoint tensors its role reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_afd import context as module
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext, current, enter
from sglang_afd.dispatch.step_plan import PlanRow, StepKind, StepPlan
from sglang_afd.families import FAMILIES, MoeFacts

pytestmark = pytest.mark.unit

FACTS = MoeFacts((1, 3), num_experts=8, top_k=2, hidden_size=4, intermediate_size=6)
CONFIG = AfdConfig(attention_ranks=2, ffn_ranks=2, attention_tp=2, max_tokens_per_rank=3)
PLAN = StepPlan(0, (StepKind.DECODE,) * 2, (1, 0), 3)


def make(rank: int = 0, **agreement: object) -> RankContext:
    return RankContext(CONFIG, rank, FAMILIES["Qwen3MoeForCausalLM"], FACTS, agreement)


def test_every_tensor_is_read_by_one_role_and_every_expert_by_one_rank() -> None:
    ranks = [make(rank) for rank in range(CONFIG.topology.world_size)]
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight"):
        assert [rank.loads_tensor(name) for rank in ranks] == [True] * 4 + [False] * 4
    for expert in range(8):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        readers = [rank.rank for rank in ranks if rank.loads_tensor(name)]
        assert readers == [4 + expert // 2]


def test_step_ids_count_up_and_the_hash_follows_the_agreement() -> None:
    context, same, other = make(model="m"), make(3, model="m"), make(model="n")
    first, second = context.next_row(StepKind.DECODE, 5), context.next_row(StepKind.IDLE, 0)
    assert first == PlanRow(0, StepKind.DECODE, 5, context.config_hash)
    assert second == PlanRow(1, StepKind.IDLE, 0, context.config_hash)
    assert same.next_row(StepKind.DECODE, 5) == first
    context.lane, context.work = 3, 0b101
    third = context.next_row(StepKind.DECODE, 5)
    assert third == PlanRow(2, StepKind.DECODE, 5, context.config_hash, lane=3, work=0b101)
    assert other.config_hash != context.config_hash


def test_a_plan_serves_one_step() -> None:
    context = make()
    context.serving, context.plan = True, PLAN
    with context.step() as plan:
        assert plan is PLAN
    with pytest.raises(RuntimeError, match=r"attention rank 0.0 .*outside of an agreed step"):
        with context.step():
            pytest.fail("the step was entered")


def test_a_failed_step_leaves_no_plan_behind() -> None:
    context = make()
    context.plan = replace(PLAN, step_id=4)
    with pytest.raises(KeyError), context.step():
        raise KeyError
    assert context.plan is None


def test_forwards_while_starting_have_no_plan() -> None:
    with make().step() as plan:
        assert plan is None


def test_a_process_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_current", None)
    with pytest.raises(RuntimeError, match="is not a rank of an AFD deployment"):
        current()
    context = enter(make(5))
    assert current() is context
    with pytest.raises(RuntimeError, match=r"already is FFN rank 0.1 \(world rank 5\)"):
        enter(make(6))
