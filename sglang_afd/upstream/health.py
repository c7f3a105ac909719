"""The health endpoints say within `FAILED_AFTER` seconds that the ranks do not step.

SGLang's ``/health`` has the ranks make a token, or waits for what they make anyway, and gives up
after 20 s.  Every step takes all ranks of both roles, so that it fails whichever of them hangs.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_afd.upstream.hooks import Hook, Kind

FAILED_AFTER = 10
"""Seconds from a health request to a 503, at most; a step that takes longer counts as a hang."""
_ENV = "SGLANG_HEALTH_CHECK_TIMEOUT"  # SGLang's own: whoever sets it has chosen
_POLL = 1  # seconds between SGLang's looks for an answer
_MARGIN = 1  # seconds that a busy HTTP server may be late by


def _shorten(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints import http_server

    if _ENV not in os.environ:
        http_server.HEALTH_CHECK_TIMEOUT = FAILED_AFTER - _POLL - _MARGIN


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        Kind.BEFORE,
        _shorten,
        "whoever routes requests must learn of a hang soon, long before the exchange timeout",
    ),
)
