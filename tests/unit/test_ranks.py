"""What ranks compare before they serve together: every field that would change an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.runtime_context as runtime_context

from sglang_afd import context as context_module
from sglang_afd import embedded
from sglang_afd.config import AfdConfig, ConfigError, differences
from sglang_afd.context import RankContext, current
from sglang_afd.upstream import ranks

pytestmark = pytest.mark.unit

CONFIG = AfdConfig(attention_ranks=1, ffn_ranks=1)
SAME: dict[str, Any] = {
    "model_path": str(embedded.path()),
    "dtype": "torch.bfloat16",
    "quantization": None,
    "revision": None,
    "load_format": "auto",
    "chunked_prefill_size": 2048,
    "disable_overlap_schedule": False,
    "max_prefill_tokens": 16384,
    "max_running_requests": None,
    "page_size": 1,
    "enable_mixed_chunk": False,
    "schedule_policy": "fcfs",
    "disable_radix_cache": False,
    "commit": None,
    "speculative_algorithm": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
}


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a rank learn its place; returns what it will compare with the others."""

    def run(rank: int = 0, **changed: Any) -> RankContext:
        told = {**SAME, **changed}
        text = SimpleNamespace(**json.loads((embedded.path() / "config.json").read_text()))
        text._commit_hash = told["commit"]
        model = SimpleNamespace(
            hf_config=text,
            hf_text_config=text,
            **{name: told[name] for name in ("model_path", "dtype", "quantization", "revision")},
        )
        bag = SimpleNamespace(tp_rank=rank, **told)
        for getter in ("get_parallel", "get_schedule", "get_memory", "get_model", "get_spec"):
            monkeypatch.setattr(runtime_context, getter, lambda: bag)
        monkeypatch.setattr(context_module, "_current", None)
        [hook] = [h for h in ranks.hooks(CONFIG) if h.target.endswith("init_model_config")]
        hook.fn(None, SimpleNamespace(model_config=model))
        return current()

    return run


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dtype": "torch.float32"}, "dtype"),
        ({"quantization": "fp8"}, "quantization"),
        ({"revision": "main"}, "revision"),
        ({"load_format": "dummy"}, "load_format"),
        ({"chunked_prefill_size": 512}, "chunked_prefill_size"),
        ({"disable_overlap_schedule": True}, "disable_overlap_schedule"),
        ({"max_prefill_tokens": 512}, "max_prefill_tokens"),
        ({"max_running_requests": 2}, "max_running_requests"),
        ({"page_size": 16}, "page_size"),
        ({"enable_mixed_chunk": True}, "enable_mixed_chunk"),
        ({"schedule_policy": "lof"}, "schedule_policy"),
        ({"disable_radix_cache": True}, "disable_radix_cache"),
        ({"speculative_algorithm": "EAGLE3"}, "speculative_algorithm"),
        ({"speculative_num_steps": 3}, "speculative_num_steps"),
        ({"speculative_eagle_topk": 1}, "speculative_eagle_topk"),
        ({"speculative_num_draft_tokens": 4}, "speculative_num_draft_tokens"),
    ],
)
def test_each_setting_is_compared(learn: Any, changed: dict[str, Any], named: str) -> None:
    here, there = learn(), learn(1, **changed)
    [difference] = differences(here.agreement, there.agreement)
    assert difference.startswith(f"{named} is ")
    assert here.config_hash != there.config_hash


def test_a_request_has_as_many_rows_as_tokens_are_verified(learn: Any) -> None:
    assert learn(speculative_num_draft_tokens=4).rows_per_request == 1
    speculating = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 4}
    assert learn(**speculating).rows_per_request == 4


def test_the_checkpoint_is_compared_by_content(learn: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(embedded.path(), tmp_path / "copy"))
    assert differences(learn().agreement, learn(1, model_path=str(copy)).agreement) == []
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"more")
    [difference] = differences(learn().agreement, learn(1, model_path=str(copy)).agreement)
    assert difference.startswith("weights is ")


def test_a_repositorys_commit_is_compared(learn: Any) -> None:
    here, there = (learn(model_path="org/name", commit=commit).agreement for commit in "ab")
    assert differences(here, there) == ["checkpoint is org/name a here and org/name b there"]


def test_ranks_that_differ_are_refused_with_names_and_difference(
    learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = learn(), learn(1, load_format="dummy")
    told = [here.agreement, there.agreement]
    monkeypatch.setattr(ranks, "gather", lambda mine, of, group: told)
    with pytest.raises(ConfigError) as refusal:
        ranks.verify_agreement(here, None)
    assert str(refusal.value) == (
        "attention rank 0 (world rank 0) and FFN rank 0 (world rank 1) are configured differently: "
        "load_format is auto here and dummy there; start every command with the same flags and "
        "model"
    )
    monkeypatch.setattr(ranks, "gather", lambda mine, of, group: [mine, mine])
    ranks.verify_agreement(here, None)
