"""Speculation: SGLang's EAGLE-3 worker on A ranks; F ranks serve the target's forwards alone.

Every rank keeps SGLang's speculative algorithm, so that all decide alike what a step is: with it a
scheduler synchronises twice in a step without prefill.  In each step the target runs once, over the
prompts or over the tokens to verify, and the plan says how many rows that has; the draft runs on
the ranks of one attention group and exchanges nothing with F.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_afd.config import AfdConfig
from sglang_afd.context import current
from sglang_afd.observe.stages import Stage
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.roles import on_ffn

_DEFAULT_AUX_LAYERS = 3  # that SGLang captures of a target if the draft names none


def no_aux_rows(runner: Any) -> torch.Tensor | None:
    """No hidden states, in the form that a draft reads of the target; None without speculation."""
    if runner.spec_algorithm.is_none():
        return None
    layers = runner.spec_aux_config.eagle_aux_hidden_state_layer_ids
    count = _DEFAULT_AUX_LAYERS if layers is None else len(layers)
    width = count * runner.model_config.hidden_size
    return torch.empty(0, width, dtype=runner.model_config.dtype, device=runner.device)


@on_ffn
def _worker_without_draft(algorithm: Any, server_args: Any) -> type:
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    class TargetAlone(BaseSpecWorker):
        """In the place of SGLang's speculative worker: no draft model, no draft KV."""

        def __init__(self, *, target_worker: Any, **_: Any) -> None:
            super().__init__()
            self._target_worker = target_worker

        @property
        def draft_worker(self) -> None:
            return None

        def forward_batch_generation(self, batch: Any, *_: Any, **__: Any) -> Any:
            """Serve the step's one forward of the target; this rank's own batch is always idle."""
            result = self._target_worker.forward_batch_generation(batch)
            nothing = torch.empty(0, dtype=torch.int64, device=batch.device)
            result.next_draft_input = EagleDraftInput(
                topk_p=nothing, topk_index=nothing, hidden_states=nothing, bonus_tokens=nothing
            )
            return result

    return TargetAlone


def _unless_of_a_draft(
    original: Callable[..., None], runner: Any, *, only_if_initialized: bool = False
) -> None:
    if only_if_initialized or not runner.is_draft_worker:
        original(runner, only_if_initialized=only_if_initialized)


def _timed(stage: Stage) -> Callable[..., Any]:
    """A hook around a function whose second argument is the batch: a stage of its verify step."""

    def run(original: Callable[..., Any], owner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle():
            return original(owner, batch, *args, **kwargs)
        context = current()
        with context.timer.beside(context.lane, stage):
            return original(owner, batch, *args, **kwargs)

    return run


def draft_state_of(batch: Any) -> Any | None:
    """What a draft goes on from in a decode batch of requests whose prefill has ended; None without
    speculation.

    SGLang keeps it by the requests' slots, so that the next step may be launched before it is
    there; a batch names the slots alone.
    """
    if batch.spec_algorithm.is_none():
        return None
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    return EagleDraftInput(future_indices=batch.req_pool_indices)


def _reads(layers: tuple[int, ...]) -> Callable[..., None]:
    """A hook after SGLang has found which layers a draft reads: those are `layers`."""

    def set_layers(found: Any, **_: Any) -> None:
        if found.eagle_use_aux_hidden_state:
            found.eagle_aux_hidden_state_layer_ids = list(layers)

    return set_layers


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Those of every deployment, and one where --afd-spec-aux-layers is given."""
    if not config.spec_aux_layers:
        return HOOKS
    chosen = Hook(
        "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state"
        ".resolve_spec_aux_hidden_state_config",
        Kind.AFTER,
        _reads(config.spec_aux_layers),
        "a draft whose config.json names no layers reads those that the user knows it to read",
    )
    return (*HOOKS, chosen)


_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"

HOOKS = (
    *(
        Hook(target, Kind.AROUND, _timed(stage), "the parts of a verify step are in the metrics")
        for target, stage in (
            (f"{_WORKER}.draft", Stage.DRAFT),
            (f"{_WORKER}._draft_extend_for_decode", Stage.DRAFT_EXTEND),
            ("sglang.srt.speculative.eagle_utils.eagle_sample", Stage.SAMPLE),
        )
    ),
    Hook(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        Kind.AROUND,
        _worker_without_draft,
        "F ranks have no draft: they serve one forward of the target in every step",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
        ".refresh_deep_gemm_layout_memory_budget",
        Kind.AROUND,
        _unless_of_a_draft,
        "all ranks of the world meet here, but F ranks have no draft, and a draft no experts",
    ),
)
