"""What speculation needs of SGLang's ranks: none of a draft on F, and no rows in the right form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_afd import context as context_module
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.upstream import speculation
from sglang_afd.upstream.hooks import Hook

pytestmark = pytest.mark.unit

FACTS = MoeFacts((0,), num_experts=4, top_k=2, hidden_size=4, intermediate_size=6)


def become(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AfdConfig(attention_ranks=1, ffn_ranks=1)
    made = RankContext(config, rank, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {})
    monkeypatch.setattr(context_module, "_current", made)


def hook(name: str) -> Hook:
    [found] = [h for h in speculation.HOOKS if h.target.endswith("." + name)]
    return found


def runner(algorithm_is_none: bool, layers: list[int] | None) -> Any:
    return SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_none=lambda: algorithm_is_none),
        spec_aux_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=layers),
        model_config=SimpleNamespace(hidden_size=4, dtype=torch.bfloat16),
        device="cpu",
    )


@pytest.mark.parametrize(("layers", "width"), [([0, 1], 8), (None, 12), ([1, 2, 3, 4], 16)])
def test_an_idle_rank_has_no_rows_of_what_the_draft_reads(
    layers: list[int] | None, width: int
) -> None:
    rows = speculation.no_aux_rows(runner(False, layers))
    assert rows is not None and rows.shape == (0, width) and rows.dtype == torch.bfloat16
    assert speculation.no_aux_rows(runner(True, layers)) is None


def test_attention_ranks_have_sglangs_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    become(0, monkeypatch)
    assert hook("create_worker").fn(lambda *_: "SGLang's", "EAGLE3", "arguments") == "SGLang's"


def test_ffn_ranks_run_the_target_once_a_step_and_have_no_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    become(1, monkeypatch)
    made = hook("create_worker").fn(lambda *_: "SGLang's", "EAGLE3", "arguments")
    asked: list[Any] = []

    def forward(batch: Any) -> SimpleNamespace:
        asked.append(batch)
        return SimpleNamespace()

    target = SimpleNamespace(forward_batch_generation=forward)
    worker = made(server_args=None, gpu_id=0, nccl_port=1, target_worker=target)
    assert worker.draft_worker is None and worker.draft_parallel_layout is None
    assert worker.preloaded_weights_bytes == 0 and worker.weight_update_runners() == []
    batch = SimpleNamespace(device="cpu")
    for more in ({}, {"on_publish": print, "pp_proxy_tensors": None}):
        result = worker.forward_batch_generation(batch, **more)
        assert asked.pop() is batch and not asked
        assert len(result.next_draft_input.topk_index) == 0
        assert len(result.next_draft_input.bonus_tokens) == 0


@pytest.mark.parametrize(
    ("draft", "refresh", "meets"),
    [(False, False, True), (True, False, False), (True, True, True), (False, True, True)],
)
def test_a_draft_meets_nobody_for_its_experts(draft: bool, refresh: bool, meets: bool) -> None:
    met: list[Any] = []
    [hook_] = [h for h in speculation.HOOKS if h.target.endswith("layout_memory_budget")]
    hook_.fn(
        lambda runner, **kwargs: met.append(kwargs),
        SimpleNamespace(is_draft_worker=draft),
        only_if_initialized=refresh,
    )
    assert bool(met) is meets
