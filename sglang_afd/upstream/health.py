"""The health endpoints say within `FAILED_AFTER` seconds that the ranks do not step.

SGLang's ``/health`` has the ranks make a token, or waits for what they make anyway, and gives up
after 20 s.  Every step takes all ranks of both roles, so that it fails whichever of them hangs.

An FFN command has no requests to ask its ranks with; SGLang's ``/health`` there always says 200.
Here each of its ranks touches a file in every cycle of its loop, which an idle world goes through
every few seconds too, and the endpoint looks how old the files are.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sglang_afd.config import AfdConfig
from sglang_afd.context import current
from sglang_afd.topology import Role
from sglang_afd.upstream.hooks import Hook, Kind

FAILED_AFTER = 10
"""Seconds from a health request to a 503, at most; a step that takes longer counts as a hang."""
_ENV = "SGLANG_HEALTH_CHECK_TIMEOUT"  # SGLang's own: whoever sets it has chosen
_PATHS = ("/health", "/health_generate")
_POLL = 1  # seconds between SGLang's looks for an answer
_MARGIN = 1  # seconds that a busy HTTP server may be late by

Asgi = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of the process that serves HTTP, and of an FFN command's ranks."""

    def guard(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        import uvicorn

        plain = uvicorn.Config
        uvicorn.Config = lambda app, **rest: plain(_guarded(app, config), **rest)  # type: ignore
        try:
            original(*args, **kwargs)
        finally:
            uvicorn.Config = plain  # type: ignore[misc]

    asked = Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        Kind.BEFORE,
        _shorten,
        "whoever routes requests must learn of a hang soon, long before the exchange timeout",
    )
    if config.command_role is not Role.FFN:
        return (asked,)
    return (
        asked,
        Hook(
            "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
            ".recv_requests",
            Kind.AFTER,
            _beat,
            "an FFN command is asked for its health, and no request of its own tells it",
        ),
        Hook(
            "sglang.srt.utils.common.launch_dummy_health_check_server",
            Kind.AROUND,
            guard,
            "its /health says 200 whatever the ranks do",
        ),
    )


def late(config: AfdConfig) -> list[str]:
    """This command's ranks that have not begun a cycle of their loop for too long, by name."""
    oldest = time.time() - _patience()
    return [config.topology.name_of(r) for r in config.local_ranks() if _beaten(r) < oldest]


def _shorten(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints import http_server

    http_server.HEALTH_CHECK_TIMEOUT = _patience()


def _patience() -> int:
    return int(os.environ.get(_ENV) or FAILED_AFTER - _POLL - _MARGIN)


def _file(rank: int) -> Path:
    """In the command's temporary folder, which its ranks share and which is gone after it."""
    return Path(tempfile.gettempdir(), f"beat-{rank}")


def _beat(*_: Any, **__: Any) -> None:
    file = _file(current().rank)
    try:
        os.utime(file)
    except FileNotFoundError:
        file.touch()


def _beaten(rank: int) -> float:
    try:
        return _file(rank).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _guarded(app: Asgi, config: AfdConfig) -> Asgi:
    """`app`, whose health endpoints answer 503 while a rank is late."""

    async def serve(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in _PATHS and (names := late(config)):
            body = f"no step of {', '.join(names)} for {_patience()} s".encode()
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": body})
        else:
            await app(scope, receive, send)

    return serve
