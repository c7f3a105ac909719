"""Balancers that read the loads see the ranks that take requests, and no others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from sglang_afd.config import AfdConfig
from sglang_afd.upstream.loads import hooks

CONFIG = AfdConfig(attention_ranks=2, ffn_ranks=2, attention_tp=2)


def test_ffn_ranks_have_no_load() -> None:
    _, hook = hooks(CONFIG)

    async def original(manager: str, dp_rank: int | None = None) -> list[SimpleNamespace]:
        assert manager == "manager"
        return [SimpleNamespace(dp_rank=n) for n in range(4) if dp_rank in (None, n)]

    def ranks(dp_rank: int | None) -> list[int]:
        loads = asyncio.run(hook.fn(original, "manager", dp_rank=dp_rank))
        return [load.dp_rank for load in loads]

    assert ranks(None) == [0, 1]
    assert (ranks(1), ranks(2)) == ([1], [])


def test_dp_ranks_are_those_that_take_requests() -> None:
    hook, _ = hooks(CONFIG)
    told = {"dp_size": 1, "tp_size": 8}
    assert hook.fn(told, "server_args", {}) == {"dp_size": 2, "tp_size": 8}
    assert told["dp_size"] == 1, "what SGLang keeps stays as it is"
