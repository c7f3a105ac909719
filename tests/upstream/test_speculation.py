"""What AFD knows of SGLang's speculation is so: kernels, defaults, the layers it captures."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_afd import speculation as settings
from sglang_afd.spec import draft
from sglang_afd.upstream import graphs

pytestmark = pytest.mark.upstream

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_drafts_without_a_gpu_are_what_sglangs_kernels_make_of_them() -> None:
    """Triton's interpreter runs the kernels."""
    program = ROOT / "tests" / "support" / "sglangs_kernels.py"
    run = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0 and "equal for" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("named", [None, [1, 46, 90]])
def test_layers_are_captured_where_the_gate_says(named: list[int] | None) -> None:
    """SGLang captures what goes into a layer: the output of the one before."""
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

    captured: list[Any] = []
    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True),
        config=SimpleNamespace(num_hidden_layers=94),
        model=SimpleNamespace(set_eagle3_layers_to_capture=captured.append),
    )
    Qwen3MoeForCausalLM.set_eagle3_layers_to_capture(model, named)
    config = {} if named is None else {"eagle_config": {draft._AUX: named}}
    assert tuple(layer - 1 for layer in captured[0]) == draft.aux_layers(config, 94)


def test_sglangs_defaults_are_those_that_rows_are_counted_with() -> None:
    from sglang.srt.arg_groups import speculative_hook

    standard = settings.asked((settings.ALGORITHM, settings.SERVED))
    assert standard is not None
    source = inspect.getsource(speculative_hook._auto_choose_speculative_params)
    shape = (standard.steps, standard.topk, standard.tokens)
    assert source.rstrip().endswith(f"return {shape}"), "for families that it does not name"
    assert "Qwen3MoeForCausalLM" not in source
    eagle = inspect.getsource(speculative_hook._handle_eagle_family)
    assert f"max_running_requests={settings._MOST_RUNNING}," in eagle


def test_the_graphs_of_a_draft_switch_no_dispatch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's would clean a DeepEP buffer of its own between a draft's prefill and its decode."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPBuffer
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.model_executor.runner_utils import deepep_adapter

    state = SimpleNamespace(buffer=None, dispatch_mode=None)
    monkeypatch.setattr(DeepEPBuffer, "_state", lambda: state)
    monkeypatch.setattr(
        deepep_adapter, "get_moe_a2a_backend", lambda: SimpleNamespace(is_deepep=lambda: True)
    )
    monkeypatch.setattr(deepep_adapter, "get_deepep_mode", lambda: DeepEPMode.AUTO)

    def extend_and_decode() -> None:
        for extends in (True, False):
            adapter = deepep_adapter.DeepEPCudaGraphRunnerAdapter()
            adapter.capture(is_extend_in_batch=extends)
            adapter.replay()

    with pytest.raises(AttributeError, match="low_latency_mode"):
        extend_and_decode()
    ours = [hook for hook in graphs.HOOKS if "DeepEPCudaGraphRunnerAdapter" in hook.target]
    for hook in ours:
        name = hook.target.rpartition(".")[2]
        monkeypatch.setattr(deepep_adapter.DeepEPCudaGraphRunnerAdapter, name, hook.fn)
    extend_and_decode()
