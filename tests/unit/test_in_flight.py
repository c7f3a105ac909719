"""What happens to requests in flight when a rank has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sglang_afd.upstream import in_flight

pytestmark = pytest.mark.unit


class Manager:
    """What is used of SGLang's tokenizer manager."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {"a": None, "b": None}
        self.told: list[Any] = []
        self.event_loop = asyncio.get_running_loop()

    def _handle_abort_req(self, request: Any) -> None:
        del self.rid_to_state[request.rid]
        self.told.append(request.finished_reason)


class Handler:
    """SGLang's signal handler."""

    def __init__(self) -> None:
        self.tokenizer_manager = Manager()
        self.ended = asyncio.Event()

    def end(self) -> None:
        """As SGLang does."""
        self.ended.set()


def run(serves: bool, monkeypatch: pytest.MonkeyPatch, then: Callable[[Handler], Any]) -> None:
    monkeypatch.setattr(in_flight, "serves", lambda: serves)
    monkeypatch.setattr(in_flight, "_TO_SEND", 0.05)

    async def main() -> None:
        handler = Handler()
        for _ in range(3):  # every rank sends the signal
            in_flight._answer_first(Handler.end, handler)
        await then(handler)

    asyncio.run(main())


def test_every_request_is_told_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def then(handler: Handler) -> None:
        told = handler.tokenizer_manager.told
        assert [(r["type"], int(r["status_code"])) for r in told] == [("abort", 503)] * 2
        assert all("send the request again" in reason["message"] for reason in told)
        assert not handler.ended.is_set(), "the answers need a moment to be sent"
        await asyncio.wait_for(handler.ended.wait(), 5)

    run(True, monkeypatch, then)


def test_an_offline_engine_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def then(handler: Handler) -> None:
        assert handler.ended.is_set() and not handler.tokenizer_manager.told

    run(False, monkeypatch, then)
