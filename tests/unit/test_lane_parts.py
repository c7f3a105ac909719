"""What lanes have of their own on a GPU: made for each, put in SGLang's places, and refused where
they would share memory all the same."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_afd.config import ConfigError
from sglang_afd.upstream import lane_parts
from sglang_afd.upstream.lane_parts import LaneParts, runner_parts, scheduler_parts

pytestmark = pytest.mark.unit

LANES = 2


def runner(backend: str = "fa3") -> Any:
    return SimpleNamespace(
        prefill_attention_backend_str="fa3",
        decode_attention_backend_str=backend,
        graph_memory_usage={"decode": 1.0},
        **{name: f"first {name}" for name in lane_parts._RUNNER},
    )


def context() -> Any:
    return SimpleNamespace(config=SimpleNamespace(lanes=LANES), lane=0)


def test_every_lane_gets_its_own_and_prefills_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    here, seen = context(), []

    def make(runner: Any, *, decodes: bool) -> dict[str, float]:
        seen.append((here.lane, decodes))
        runner.attn_backend = f"backend of {here.lane}"
        runner.decode_cuda_graph_runner = f"graphs of {here.lane}" if decodes else None
        return {"decode": 0.5} if decodes else {}

    monkeypatch.setattr(lane_parts, "_make", make)
    monkeypatch.setattr(lane_parts, "_apart", lambda runner: nullcontext())
    it = runner()
    first, second, prefill = runner_parts(it, here)
    assert seen == [(1, True), (2, False)] and here.lane == 0
    assert first["attn_backend"] == it.attn_backend == "first attn_backend"
    assert second["attn_backend"] == "backend of 1"
    assert second["decode_cuda_graph_runner"] == "graphs of 1"
    assert prefill["attn_backend"] == "backend of 2" and not prefill["decode_cuda_graph_runner"]
    assert it.graph_memory_usage == {"decode": 1.5}, "of all lanes"


def test_parts_are_in_place_in_a_turn_alone() -> None:
    scheduler = SimpleNamespace(
        forward_stream="own", tp_worker=SimpleNamespace(model_runner=runner())
    )
    parts = LaneParts({"forward_stream": "lane's"}, {"attn_backend": "lane's"})
    with pytest.raises(ZeroDivisionError), parts.in_place(scheduler):
        assert scheduler.forward_stream == "lane's"
        assert scheduler.tp_worker.model_runner.attn_backend == "lane's"
        raise ZeroDivisionError
    assert scheduler.forward_stream == "own"
    assert scheduler.tp_worker.model_runner.attn_backend == "first attn_backend"


def test_without_a_gpu_a_lane_has_no_streams() -> None:
    scheduler: Any = SimpleNamespace(device="cpu")
    assert [scheduler_parts(scheduler, lane, context()) for lane in range(LANES + 1)] == [{}] * 3


def test_backends_that_share_a_workspace_are_refused() -> None:
    with pytest.raises(ConfigError, match="flashinfer is none that is known to be; use --att"):
        runner_parts(runner("flashinfer"), context())


def test_graphs_whose_memory_is_lent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.runner_utils import pool

    monkeypatch.setattr(pool, "graph_pool_borrow_enabled", lambda: True)
    with pytest.raises(ConfigError, match=r"SGLANG_ENABLE_GRAPH_POOL_BORROW.*unset it"):
        runner_parts(runner(), context())
