"""Which ranks still answer, found out once a wait for all of them has run out.

A collective of many ranks that times out does not say for whom it waited.  The ranks that waited in
vain say so in the world's key-value store; who says nothing within a few moments is the one that
hangs.  Nothing is written while all goes well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

PATIENCE = 2.0
"""Seconds for the other ranks to notice the same: their waits began within a step of ours."""

_HOST = 0  # the rank whose process holds the store


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` are written."""


def answer(store: Store, rank: int, patience: float = PATIENCE) -> None:
    """Say that `rank` is alive and waits, `patience` seconds long at most."""
    _bounded(lambda: store.set(_key(rank), "waits"), patience)


def absent(store: Store, rank: int, ranks: range, patience: float = PATIENCE) -> list[int]:
    """Answer as `rank`; return which other `ranks` do not within about `patience` seconds.

    A store that is silent itself means that the rank which holds it hangs: then that one.
    """
    silent: set[int] | None = None

    def call() -> None:
        nonlocal silent
        store.set(_key(rank), "waits")
        end = time.monotonic() + patience
        missing = set(ranks) - {rank}
        while missing and time.monotonic() < end:
            missing = {other for other in missing if not store.check([_key(other)])}
            silent = missing
            time.sleep(0.02)

    _bounded(call, 1.5 * patience)
    return [_HOST] if silent is None else sorted(silent)


def _key(rank: int) -> str:
    return f"sglang_afd/rollcall/{rank}"


def _bounded(call: Callable[[], None], seconds: float) -> None:
    """Run `call` for `seconds` at most; a store's own waits for its host have no bound."""

    def run() -> None:
        with suppress(RuntimeError):  # the store is gone, with the rank that holds it
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
