"""KV memory: sized over the A ranks alone, and none at all on F ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_afd.context import current
from sglang_afd.upstream.groups import attention_group
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.roles import on_ffn

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


def _share_over_attention_ranks(configurator: Any, **kwargs: Any) -> None:
    configurator.attn_dp_size = current().config.attention_ranks


def _minimum_over_attention_ranks(
    original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any
) -> int:
    from sglang.srt.mem_cache import kv_cache_configurator as module

    measure = module.get_available_gpu_memory

    def measure_attention_ranks(*a: Any, **k: Any) -> float:
        k["cpu_group"] = attention_group()
        k["distributed"] = len(current().topology.attention_world) > 1
        return measure(*a, **k)

    module.get_available_gpu_memory = measure_attention_ranks
    try:
        return original(configurator, *args, **kwargs)
    finally:
        module.get_available_gpu_memory = measure


@on_ffn
def _smallest_pool_on_ffn(configurator: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.runtime_context import get_schedule

    # The scheduler only needs a size that could hold a request; nothing is ever stored.
    page = get_schedule().page_size
    tokens = -(-(configurator.model_config.context_len + 1) // page) * page
    return MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=1,
        mem_fraction_static=get_schedule().mem_fraction_static,
    )


@on_ffn
def _no_kv_on_ffn(configurator: Any, *, sizes: Any, **kwargs: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool

    return NoOpMHATokenToKVPool(
        size=sizes.max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        head_num=1,
        head_dim=1,
        layer_num=0,
        device=configurator.device,
        enable_memory_saver=False,
    )


HOOKS = (
    Hook(
        f"{_CONFIGURATOR}.configure",
        Kind.BEFORE,
        _share_over_attention_ranks,
        "max running requests are shared by the A ranks, F ranks take none",
    ),
    Hook(
        f"{_CONFIGURATOR}._profile_available_bytes",
        Kind.AROUND,
        _minimum_over_attention_ranks,
        "the KV pool is the minimum over A ranks: the experts of F must not shrink it",
    ),
    Hook(
        f"{_CONFIGURATOR}._resolve_memory_pool_config",
        Kind.AROUND,
        _smallest_pool_on_ffn,
        "F ranks hold no requests, so their pool is not sized by free memory",
    ),
    Hook(
        f"{_CONFIGURATOR}._build_token_to_kv_pool",
        Kind.AROUND,
        _no_kv_on_ffn,
        "F ranks allocate no KV buffers",
    ),
)
