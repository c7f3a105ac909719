"""Requests that AFD refuses: each answers at once with the reason, and reaches no rank.

The reasons are those of the feature table (`sglang_afd.features`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_afd.features import refused_request
from sglang_afd.features.row import LEAVE_OUT
from sglang_afd.upstream.hooks import Hook, Kind

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_ANSWERING: dict[str, tuple[object, ...]] = {
    # methods that return (success, message, ...), which their endpoint makes a 400: what follows
    f"{_CONTROL}.update_weights_from_tensor": (),
    f"{_CONTROL}.update_weights_from_distributed": (),
    f"{_CONTROL}.update_weights_from_ipc": (),
    f"{_CONTROL}.init_weights_update_group": (),
    f"{_CONTROL}.destroy_weights_update_group": (),
    f"{_CONTROL}.begin_weight_update": (),
    f"{_CONTROL}.end_weight_update": (),
    f"{_CONTROL}.init_weights_send_group_for_remote_instance": (),
    f"{_CONTROL}.send_weights_to_remote_instance": (),
    f"{_CONTROL}.check_weights": (None, None),
}
_RAISING = (
    # methods that have no way to answer "no"
    f"{_CONTROL}.load_lora_adapter",
    f"{_CONTROL}.load_lora_adapter_from_tensors",
    f"{_CONTROL}.get_weights_by_name",
    f"{_CONTROL}.release_memory_occupation",
    f"{_CONTROL}.resume_memory_occupation",
    f"{_CONTROL}.start_expert_distribution_record",
    f"{_CONTROL}.stop_expert_distribution_record",
    f"{_CONTROL}.dump_expert_distribution_record",
)
_ENDPOINTS = {"check_weights": "weights_checker"}
_FIELDS = (
    *("image_data", "video_data", "audio_data", "lora_path"),
    *("return_routed_experts", "return_hidden_states"),
)
_EMBEDDING = "EmbeddingReqInput"  # what /encode, /classify, /v1/embeddings and others make
_BEAM = "sampling_params.beam_width"


def refusal(request: str) -> str:
    """What a client that makes a refused `request` is told."""
    feature = refused_request(request)
    mend = feature.mend
    if request.startswith("/") and mend == LEAVE_OUT:
        mend = "do not call it"
    return f"AFD refuses {request}: {feature.reason}; {mend}"


def _answer(request: str, rest: tuple[object, ...]) -> Callable[..., Any]:
    message = refusal(request)

    async def answer(*args: Any, **kwargs: Any) -> tuple[object, ...]:
        return (False, message, *rest)

    return answer


def _raise(request: str) -> Callable[..., Any]:
    message = refusal(request)

    async def answer(*args: Any, **kwargs: Any) -> None:
        from fastapi import HTTPException

        raise HTTPException(status_code=400, detail=message)

    return answer


def _refuse_fields(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if type(request).__name__ == _EMBEDDING:
        raise ValueError(refusal("/encode").replace("/encode", "embeddings", 1))
    for name in _FIELDS:
        if getattr(request, name, None):
            raise ValueError(refusal(name))
    parameters = getattr(request, "sampling_params", None) or {}
    for one in parameters if isinstance(parameters, list) else [parameters]:
        if isinstance(one, dict) and (one.get("beam_width") or 1) > 1:
            raise ValueError(refusal(_BEAM))


def _request(target: str) -> str:
    """The endpoint that a tokenizer-manager method answers."""
    method = target.rpartition(".")[2]
    return "/" + _ENDPOINTS.get(method, method)


def _hook(target: str, answer: Callable[[str], Callable[..., Any]]) -> Hook:
    request = _request(target)
    return Hook(target, Kind.REPLACE, answer(request), refused_request(request).reason)


HOOKS: tuple[Hook, ...] = (
    *(_hook(target, partial(_answer, rest=rest)) for target, rest in _ANSWERING.items()),
    *(_hook(target, _raise) for target in _RAISING),
    Hook(
        f"{_MANAGER}.generate_request",
        Kind.BEFORE,
        _refuse_fields,
        "a request that asks for a refused feature is the client's mistake: 400",
    ),
)
