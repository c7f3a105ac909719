"""Requests in flight when the deployment fails end with an error that their clients can read.

SGLang ends its HTTP server at once: connections break, and whether an answer was whole is the
client's guess.  Here each request gets a 503, or as the last event of its stream an abort that says
503, and a moment to send it.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

from sglang_afd.causes import REQUEST_LOST
from sglang_afd.upstream.ending import serves
from sglang_afd.upstream.hooks import Hook, Kind

_TO_SEND = 0.5
"""Seconds that the HTTP server has to send the errors before it ends."""
_ending: WeakSet[Any] = WeakSet()  # SGLang's tokenizer managers whose end is under way


def _answer_first(original: Callable[..., None], handler: Any, *args: Any, **kwargs: Any) -> None:
    """Runs in the event loop: signal handlers of it do."""
    manager = handler.tokenizer_manager
    if not serves():
        return original(handler, *args, **kwargs)
    if manager in _ending:
        return None  # every rank that ends sends the signal
    _ending.add(manager)
    try:
        fail_all(manager)
    finally:
        manager.event_loop.call_later(_TO_SEND, lambda: original(handler, *args, **kwargs))
    return None


def fail_all(manager: Any) -> None:
    """End every request that SGLang's tokenizer `manager` holds, with an error of the server's."""
    from sglang.srt.managers.io_struct import AbortReq

    reason = {
        "type": "abort",
        "message": REQUEST_LOST,
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "err_type": HTTPStatus.SERVICE_UNAVAILABLE.phrase,
    }
    for request in list(manager.rid_to_state):
        manager._handle_abort_req(AbortReq(rid=request, finished_reason=dict(reason)))


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
        Kind.AROUND,
        _answer_first,
        "a client must see an error, not a connection that breaks in the middle of an answer",
    ),
)
