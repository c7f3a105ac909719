"""What balancers read, loads and how many DP ranks, is that of the ranks that take requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sglang_afd.config import AfdConfig
from sglang_afd.upstream.hooks import Hook, Kind


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of the process that serves HTTP."""

    async def attention_loads(
        original: Callable[..., Awaitable[list[Any]]], *args: Any, **kwargs: Any
    ) -> list[Any]:
        loads = await original(*args, **kwargs)
        return [load for load in loads if load.dp_rank < config.topology.leading_ranks]

    def attention_ranks(result: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**result, "dp_size": config.topology.leading_ranks}

    return (
        Hook(
            "sglang.srt.utils.common.build_server_info",
            Kind.AFTER,
            attention_ranks,
            "SGLang's router names DP ranks below this number in its requests; it would be 1",
        ),
        Hook(
            "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.get_loads",
            Kind.AROUND,
            attention_loads,
            "/v1/loads would show FFN ranks as idle, with room for requests",
        ),
    )
