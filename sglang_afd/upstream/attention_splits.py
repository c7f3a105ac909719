"""FlashAttention-3's decode on A ranks follows our split plan (`sglang_afd.kernels.splits`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from sglang_afd.config import ConfigError
from sglang_afd.context import current
from sglang_afd.topology import Role
from sglang_afd.upstream.hooks import Hook, Kind

ENV = "SGLANG_AFD_SPLIT_PLAN"
"""For measurements: 0 leaves the plan to FlashAttention."""


def _planned(
    backend: Any, processors: int, batch_size: int, _: int, cache_seqlens: Any, *rest: Any
) -> torch.Tensor | None:
    """In the place of ``FlashAttentionBackend._compute_scheduler_metadata``."""
    from sglang_afd.kernels.splits import MOST_REQUESTS, most_splits, plan_splits

    backend.decode_num_splits = 0
    if not 1 <= batch_size <= MOST_REQUESTS:
        return None
    heads = backend.num_kv_heads
    most = most_splits(batch_size, heads, processors)
    backend.decode_num_splits = most
    return plan_splits(cache_seqlens[:batch_size], kv_heads=heads, processors=processors, most=most)


def _follow_plan(backends: Any, **_: Any) -> None:
    wish = os.environ.get(ENV, "1")
    if wish not in ("0", "1"):
        raise ConfigError(f"{ENV} is {wish!r}; use 0 or 1")
    if wish == "0" or current().role is not Role.ATTENTION or not torch.cuda.is_available():
        return
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    # A kernel of another lane that waits holds registers, and a piece takes all of a processor's.
    processors -= current().config.lanes - 1
    both = (backends.attn_backend, backends.decode_attn_backend)
    for backend in _flash_attention(both, current().config.attention_tp):
        backend._compute_scheduler_metadata = partial(_planned, backend, processors)


def _flash_attention(backends: Iterable[Any], attention_tp: int) -> Iterator[Any]:
    """The FA3 backends among `backends`, also of hybrid models, that may choose their splits."""
    for backend in backends:
        part: Any
        for part in (backend, getattr(backend, "full_attn_backend", None)):
            if (
                getattr(part, "_get_scheduler_metadata", None) is not None
                and not part.use_mla
                and part.num_splits == 0  # 1: deterministic inference
                and part.num_attention_heads <= 64 * part.num_kv_heads * attention_tp
            ):
                yield part


HOOKS = (
    Hook(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup"
        ".build_attention_backends",
        Kind.AFTER,
        _follow_plan,
        "decode attention is what A ranks do most; FlashAttention's own splits leave processors "
        "idle, and SGLang plans none ahead under DP attention",
    ),
)
