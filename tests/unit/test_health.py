"""How long /health waits, and what an FFN command's says."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_afd.config import AfdConfig
from sglang_afd.topology import Role
from sglang_afd.upstream import health

pytestmark = pytest.mark.unit

FFN = AfdConfig(attention_ranks=1, ffn_ranks=2, command_role=Role.FFN)


@pytest.mark.parametrize(("given", "seconds"), [(None, 8), ("60", 60)])
def test_patience(monkeypatch: pytest.MonkeyPatch, given: str | None, seconds: int) -> None:
    """Below the bound, by SGLang's polling and a margin; a user's own value counts more."""
    import sglang.srt.entrypoints as entrypoints

    server: Any = ModuleType("http_server")
    monkeypatch.setitem(sys.modules, f"{entrypoints.__name__}.http_server", server)
    monkeypatch.setattr(entrypoints, "http_server", server, raising=False)
    monkeypatch.delenv("SGLANG_HEALTH_CHECK_TIMEOUT", raising=False)
    if given is not None:
        monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", given)
    health._shorten()
    assert seconds == server.HEALTH_CHECK_TIMEOUT


def asked(path: str) -> int:
    """The status that the FFN command's server answers."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(health._guarded(app, FFN)({"type": "http", "path": path}, None, send))
    return sent[0]["status"]


def test_an_ffn_command_is_healthy_while_all_its_ranks_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert health.late(FFN) == ["FFN rank 0 (world rank 1)", "FFN rank 1 (world rank 2)"]
    for rank in (1, 2):
        monkeypatch.setattr(health, "current", lambda rank=rank: SimpleNamespace(rank=rank))
        health._beat()
    assert health.late(FFN) == [] and asked("/health") == asked("/health_generate") == 200
    then = time.time() - 9
    os.utime(tmp_path / "beat-2", (then, then))
    assert health.late(FFN) == ["FFN rank 1 (world rank 2)"]
    assert asked("/health") == asked("/health_generate") == 503 and asked("/ping") == 200
    health._beat()
    assert asked("/health") == 200


def test_only_an_ffn_command_s_ranks_beat() -> None:
    whole = AfdConfig(attention_ranks=1, ffn_ranks=2)
    assert len(health.hooks(whole)) == 1 and len(health.hooks(FFN)) == 3
