"""KV memory: sized over the A ranks alone, and none at all on F ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from sglang_afd.context import current
from sglang_afd.topology import Mode
from sglang_afd.transports import estimate
from sglang_afd.upstream.groups import attention_group
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.roles import on_ffn

_BOOTSTRAP = "sglang.srt.distributed.bootstrap"
_POOL = "sglang.srt.mem_cache.kv_cache_configurator"
_CONFIGURATOR = f"{_POOL}.KVCacheConfigurator"


def _share_over_attention_ranks(configurator: Any, **kwargs: Any) -> None:
    configurator.attn_dp_size = current().topology.leading_ranks


def _minimum_over_attention_ranks(module: str) -> Callable[..., Any]:
    """An AROUND hook: what `module` measures as the world's minimum is that of the A ranks.

    F ranks, whose GPUs may be smaller and hold other weights, then measure their own alone; so do
    all ranks in CAD mode, where `sglang_afd.upstream.cad_memory` compares the pools.
    """

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        measuring: Any = import_module(module)
        measure = measuring.get_available_gpu_memory

        def measure_own_role(*a: Any, **k: Any) -> float:
            if k.get("distributed"):
                context = current()
                of_many = len(context.topology.leading_world) > 1
                k["distributed"] = context.config.mode is Mode.AFD and context.leads and of_many
                k["cpu_group"] = attention_group()
            return measure(*a, **k)

        measuring.get_available_gpu_memory = measure_own_role
        try:
            return original(*args, **kwargs)
        finally:
            measuring.get_available_gpu_memory = measure

    return hook


def _leave_room_for_rounds(result: Any, configurator: Any, *args: Any, **kwargs: Any) -> Any:
    """What a round of the exchange takes beside the buffers is no room for KV."""
    context, model = current(), configurator.model_config
    buffers = estimate(
        context.config,
        context.facts,
        itemsize=model.dtype.itemsize,
        fp8=model.quantization == "fp8",
    )
    return max(0, result - buffers.attention.passing)


def _count_the_drafts_own_kv(_: None, sizes: Any, configurator: Any, *args: Any) -> None:
    """A token's KV in the draft is what the draft's own heads make it."""
    draft = configurator.spec_aux_config.draft_model_config
    if configurator.is_draft_worker or draft is None:
        return
    heads = draft.get_num_kv_heads(configurator.draft_attn_tp_size)
    elements = configurator.spec_aux_config.draft_kv_num_layers * heads
    elements *= draft.head_dim + draft.v_head_dim
    layers = configurator.layer_info.num_effective_layers
    of_target = sizes._compute_cell_size(configurator, layers)
    sizes._cell_size = of_target + elements * configurator.kv_cache_dtype.itemsize


@on_ffn
def _smallest_pool_on_ffn(configurator: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.runtime_context import get_context, get_schedule

    if configurator.mambaish_config is not None:
        slots = configurator._calculate_mamba_ratio()  # of one request
        get_context().override("sglang_afd", max_mamba_cache_size=slots)
    # The scheduler only needs a size that could hold a request; nothing is ever stored.
    page = get_schedule().page_size
    tokens = -(-(configurator.model_config.context_len + 1) // page) * page
    return MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=1,
        mem_fraction_static=get_schedule().mem_fraction_static,
    )


def no_kv(configurator: Any, *, sizes: Any, **kwargs: Any) -> Any:
    """A KV pool of that size in name, with no buffers."""
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


@on_ffn
def _no_states_on_ffn(configurator: Any) -> list[int]:
    return []


HOOKS = (
    Hook(
        f"{_CONFIGURATOR}.configure",
        Kind.BEFORE,
        _share_over_attention_ranks,
        "max running requests are shared by the A ranks, F ranks take none",
    ),
    Hook(
        f"{_BOOTSTRAP}.measure_pre_model_load_memory",
        Kind.AROUND,
        _minimum_over_attention_ranks(_BOOTSTRAP),
        "the KV pool's slack is a share of this, and SGLang refuses GPUs of unequal free memory",
    ),
    Hook(
        f"{_CONFIGURATOR}._profile_available_bytes",
        Kind.AROUND,
        _minimum_over_attention_ranks(_POOL),
        "the KV pool is the minimum over A ranks: the experts of F must not shrink it",
    ),
    Hook(
        f"{_CONFIGURATOR}._profile_available_bytes",
        Kind.AFTER,
        _leave_room_for_rounds,
        "a round's rows must fit beside the KV pool",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__",
        Kind.AFTER,
        _count_the_drafts_own_kv,
        "SGLang takes the draft's KV of a token for that of one of the target's layers, so a draft "
        "with more heads would not fit beside the pool",
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
        on_ffn(no_kv),
        "F ranks allocate no KV buffers",
    ),
    Hook(
        f"{_CONFIGURATOR}._get_mamba_layer_ids_for_req_pool",
        Kind.AROUND,
        _no_states_on_ffn,
        "F ranks keep no states of linear attention: those are of layers on A ranks",
    ),
)
