"""What is asked of a rank while it runs: a step is timed only while somebody wants to know."""

from __future__ import annotations

import pytest

from sglang_afd import context as context_module
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.dispatch.step_plan import Caps, StepKind, StepPlan
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.observe.stages import HostClock
from sglang_afd.upstream import telemetry as module
from sglang_afd.upstream.telemetry import RECORD, SHOW, WATCH, Telemetry

pytestmark = pytest.mark.unit

FACTS = MoeFacts((0, 1), num_experts=4, top_k=2, hidden_size=4, intermediate_size=8)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> RankContext:
    config = AfdConfig(attention_ranks=1, ffn_ranks=1)
    made = RankContext(config, 0, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {})
    monkeypatch.setattr(context_module, "_current", made)
    return made


def run(rank: RankContext, step: int, marks: list[float], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostClock, "mark", lambda clock: marks.append(1.0) or 1.0)
    plan = StepPlan(step, (StepKind.DECODE, StepKind.IDLE), (2, 0), Caps(4, None))
    with rank.timer.step(plan, plan.rounds):
        pass


def test_a_complete_trace_costs_no_more(rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, marks = Telemetry(), list[float]()
    run(rank, 0, marks, monkeypatch)
    assert not marks
    telemetry.obey(RECORD, 2)
    for step in range(1, 5):
        run(rank, step, marks, monkeypatch)
    assert len(marks) == 2 * 2, "steps 3 and 4 were timed for nobody"
    telemetry.obey(SHOW, 1)
    assert [step["step_id"] for step in telemetry.state()["trace"]["steps"]] == [1, 2]
    telemetry.obey(RECORD, 1)
    run(rank, 5, marks, monkeypatch)
    assert [step["step_id"] for step in telemetry.state()["trace"]["steps"]] == [5]
    telemetry.obey(RECORD, 0)
    assert telemetry.state() == {}


def test_a_rank_is_watched_while_somebody_asks(
    rank: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry, marks, now = Telemetry(), list[float](), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def timed(step: int) -> bool:
        before = len(marks)
        run(rank, step, marks, monkeypatch)
        return len(marks) > before

    telemetry.obey(WATCH, 1)
    assert timed(1) and timed(2)
    now[0] += module.WATCHED - 1
    telemetry.obey(WATCH, 1)
    now[0] += module.WATCHED - 1
    assert timed(3) and "recent" in telemetry.state()
    now[0] += 2
    timed(4)  # the first step that comes too late is noticed as it ends
    assert not timed(5) and "recent" not in telemetry.state()
    telemetry.obey(WATCH, 1)
    assert timed(6) and telemetry.state()["recent"]["steps"] >= 0
