"""CAD: the KV pool lies on attention ranks, its allocators are those of the model ranks.

Every attention rank has the keys and values of its heads for all tokens, so the pool has as many
tokens as the attention rank with the fewest.  Each model rank's allocator gets an equal stretch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sglang_afd.context import current, entered
from sglang_afd.topology import Role
from sglang_afd.upstream.gather import gather
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.memory import no_kv
from sglang_afd.upstream.roles import on_model


class Pool(msgspec.Struct, frozen=True):
    """What a rank holds: nothing, on model ranks."""

    tokens: int = 0
    states: int = 0
    """Recurrent states of linear attention."""


_stretches = Pool()


def share_of_pool(index: int) -> Pool:
    """What to add to the slots of the model rank with that index, to find them in the pools."""
    return Pool(index * _stretches.tokens, index * _stretches.states)


def stretch(tokens: int, page: int, ranks: int) -> int:
    """Tokens for each of `ranks` allocators out of a pool of `tokens`.

    A pool has a page more than it has tokens, which no request gets; so has each stretch.
    """
    return ((tokens + page) // ranks - page) // page * page


def _agree_on_the_pool(original: Callable[..., Any], configurator: Any, *a: Any, **k: Any) -> Any:
    """All ranks learn how many tokens a model rank may have."""
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.runtime_context import get_context, get_parallel, get_schedule

    global _stretches
    context, page = current(), get_schedule().page_size
    holds = context.role is Role.ATTENTION
    config = original(configurator, *a, **k) if holds else None
    recurrent = configurator.mambaish_config is not None
    own = Pool()
    if config is not None:
        own = Pool(
            int(config.max_total_num_tokens),
            get_schedule().max_mamba_cache_size if recurrent else 0,
        )
    told = gather(own, Pool, get_parallel().tp_group.cpu_group)
    ranks = context.topology.leading_ranks
    held = [told[rank] for rank in context.topology.serving_world]
    tokens = stretch(min(pool.tokens for pool in held), page, ranks)
    states = stretch(min(pool.states for pool in held), 1, ranks) if recurrent else 0
    if tokens < page:
        raise RuntimeError(
            f"the attention ranks' KV pool is too small for {ranks} model ranks; raise "
            f"--mem-fraction-static or --max-total-tokens"
        )
    _stretches = Pool(tokens + page, states + 1)
    if config is None:
        if recurrent:
            get_context().override("sglang_afd", max_mamba_cache_size=states)
        requests = configurator.resolve_max_num_reqs(tokens)
        return MemoryPoolConfig(
            max_total_num_tokens=tokens,
            max_running_requests=requests,
            mem_fraction_static=get_schedule().mem_fraction_static,
        )
    # It has a row of slots for each request of everybody's.
    config.max_running_requests = ranks * configurator.resolve_max_num_reqs(tokens)
    return config


def _own_heads(configurator: Any, **kwargs: Any) -> None:
    """An attention rank's pool has its heads alone."""
    context = current()
    if context.role is Role.ATTENTION:
        model = configurator.model_config
        heads = model.get_num_kv_heads(1) // context.topology.attention_ranks
        model.get_num_kv_heads = lambda *_, **__: heads


def _own_states(original: Callable[..., Any], **kwargs: Any) -> Any:
    """An attention rank's states are of its heads alone."""
    if entered() and current().role is Role.ATTENTION:
        kwargs["tp_world_size"] = current().topology.attention_ranks
    return original(**kwargs)


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
HOOKS = (
    Hook(
        "sglang.srt.configs.mamba_utils.Mamba2StateShape.create",
        Kind.AROUND,
        _own_states,
        "the recurrent states of an attention rank are those of its share of the heads",
    ),
    Hook(
        f"{_CONFIGURATOR}.configure",
        Kind.BEFORE,
        _own_heads,
        "the pool of an attention rank is that of its share of the heads",
    ),
    Hook(
        f"{_CONFIGURATOR}._resolve_memory_pool_config",
        Kind.AROUND,
        _agree_on_the_pool,
        "what a model rank may allocate is what the attention ranks hold",
    ),
    Hook(
        f"{_CONFIGURATOR}._build_token_to_kv_pool",
        Kind.AROUND,
        on_model(no_kv),
        "model ranks allocate no KV buffers",
    ),
)
