"""What Prometheus and the status page are told of steps whose figures are known."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from sglang_afd.dispatch.step_plan import Caps, StepKind, StepPlan
from sglang_afd.observe import status
from sglang_afd.observe.metrics import SERIES, StepMetrics
from sglang_afd.observe.stages import Span, Stage, StepTimes
from sglang_afd.observe.summary import WINDOW, RecentSteps

pytestmark = pytest.mark.unit

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
LAYERS = 2
LABELS = {"role": "ffn", "rank": "2", "lane": "0", "path": "decode"}


def times(start: float = 10.0, *, replayed: bool = False) -> StepTimes:
    """An F rank's step of 8 rows in two slices, over 2 layers: 6 ms of 10 are its own work."""
    plan = StepPlan(7, (StepKind.DECODE,) * 2 + (StepKind.IDLE,), (5, 3, 0), Caps(4, None))
    spans = [
        Span(Stage.RECEIVE, start, start + 0.003),
        Span(Stage.EXPERTS, start + 0.003, start + 0.009),
        Span(Stage.REPLY, start + 0.009, start + 0.010),
    ]
    return StepTimes(
        plan=plan,
        rounds=plan.rounds,
        path=plan.rounds[0].path,
        rows=8,
        agreed=start - 0.002,
        start=start,
        end=start + 0.010,
        interval=0.012,
        spans=() if replayed else tuple(spans),
        replayed=replayed,
        loads=None if replayed else torch.tensor([[4, 0], [1, 3], [2, 2], [0, 4]]),
    )


def test_the_series_of_a_step() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics("ffn", 2, row_bytes=64, layers=LAYERS, registry=registry)
    metrics(times())
    metrics(times(replayed=True))

    def value(name: str, **more: str) -> float:
        found = registry.get_sample_value(f"sglang_afd_{name}", {**LABELS, **more})
        assert found is not None, name
        return found

    assert value("step_seconds_count") == 2
    assert value("step_seconds_sum") == pytest.approx(0.020)
    assert value("step_interval_seconds_sum") == pytest.approx(0.024)
    assert value("plan_lead_seconds_sum") == pytest.approx(0.004)
    assert value("stage_seconds_total", stage="experts") == pytest.approx(0.006)
    assert value("exposed_seconds_total") == pytest.approx(0.004)
    assert value("replayed_steps_total") == 1
    assert value("exchanges_total") == 2 * 2 * LAYERS
    assert value("exchanged_rows_total") == 2 * 8 * LAYERS
    assert value("exchanged_bytes_total") == 2 * 8 * LAYERS * 64
    assert value("counted_exchanges_total") == 4
    assert value("expert_rows_total") == 16
    assert value("busiest_expert_rows_total") == 4 + 3 + 2 + 4
    assert value("touched_experts_total") == 1 + 2 + 2 + 1


def test_every_series_is_documented() -> None:
    said = DOCUMENT.read_text()
    for series in SERIES:
        assert f"`sglang_afd_{series.name}`" in said or f"`sglang_afd_{series.name}_total`" in said


def test_how_busy_a_rank_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 10.0)
    recent = RecentSteps()
    monkeypatch.setattr(time, "monotonic", lambda: 10.1)
    for begin in (10.0, 10.02, 10.04):
        recent(times(begin))
    found = recent.summary()
    assert (found.steps, found.rows) == (3, 24)
    assert found.seconds == pytest.approx(0.1)
    assert found.working == pytest.approx(0.18)
    assert found.exchanging == pytest.approx(0.12)
    recent(times(10.06, replayed=True))
    assert recent.summary().working is None
    for _ in range(6):
        recent(times(10.06))
    assert recent.summary().working == pytest.approx(9 * 0.06), "one untold step of ten"
    monkeypatch.setattr(time, "monotonic", lambda: 10.2 + WINDOW)
    assert recent.summary().steps == 0


def state(rank: int, name: str, **more: Any) -> dict[str, Any]:
    ranks = [
        {"rank": "attention rank 0 (world rank 0)", "role": "attention"},
        {"rank": "attention rank 0 (world rank 1)", "role": "attention"},
        {"rank": "FFN rank 0 (world rank 2)", "role": "ffn"},
    ]
    own = {"rank": name, "ranks": ranks, "config": {"attention_tp": 2}, **more}
    return {"model_path": "m", "afd": own}


def test_status_joins_what_the_ranks_say() -> None:
    load = {
        "num_running_reqs": 3,
        "num_waiting_reqs": 1,
        "num_used_tokens": 90,
        "gen_throughput": 5.0,
    }
    states = [
        state(2, "FFN rank 0 (world rank 2)", recent={"steps": 4}),
        state(0, "attention rank 0 (world rank 0)", trace={"rank": 0}),
    ]
    told = status.of(states, {0: load}, started=time.time() - 5)
    first, second, ffn = told["ranks"]
    assert first["load"] == {
        "running_requests": 3,
        "waiting_requests": 1,
        "kv_tokens_used": 90,
        "tokens_per_second": 5.0,
    }
    assert second["load"] is None, "the requests of a DP rank are told once"
    assert ffn["load"] is None and ffn["recent"] == {"steps": 4} and ffn["world_rank"] == 2
    assert 5 <= told["up_seconds"] < 60
    assert status.trace_of(states)["ranks"] == [{"rank": 0}]


def test_what_is_beside_a_step_is_in_its_stages_and_not_in_its_time() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics("attention", 0, row_bytes=64, layers=LAYERS, registry=registry)
    beside = (Span(Stage.DRAFT, 9.0, 9.5), Span(Stage.SAMPLE, 9.5, 9.75))
    metrics(times()._replace(beside=beside))
    labels = {**LABELS, "role": "attention", "rank": "0"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"sglang_afd_{name}", {**labels, **more})

    assert value("stage_seconds_total", stage="draft") == pytest.approx(0.5)
    assert value("stage_seconds_total", stage="sample") == pytest.approx(0.25)
    assert value("step_seconds_sum") == pytest.approx(0.010)
    assert value("exposed_seconds_total") == pytest.approx(0.004)
