"""After a wait that ran out, the rank that hangs is found, also if it is the store's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from sglang_afd.rollcall import absent, answer

pytestmark = pytest.mark.unit

FOUR = range(4)
PATIENCE = 0.3


class Silent:
    """A store whose host hangs: what is asked of it never returns."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def set(self, key: str, value: str) -> None:
        """As TCP does, take what fits into the connection's buffer."""

    def check(self, keys: list[str]) -> bool:
        self.end.wait()
        return False


class Gone(Silent):
    """A store whose host has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


@pytest.fixture
def silent() -> Iterator[Silent]:
    store = Silent()
    yield store
    store.end.set()


def test_ranks_that_do_not_answer_are_absent() -> None:
    store = HashStore()
    answer(store, 1)
    assert absent(store, 0, FOUR, PATIENCE) == [2, 3]


@pytest.mark.parametrize("hanging", FOUR)
def test_every_other_rank_finds_the_one_that_hangs(hanging: int) -> None:
    store = HashStore()
    others = [rank for rank in FOUR if rank != hanging]
    with ThreadPoolExecutor(len(FOUR)) as pool:
        found = list(pool.map(lambda rank: absent(store, rank, FOUR, PATIENCE), others))
    assert found == [[hanging]] * 3


def test_a_rank_that_notices_a_little_later_is_not_absent() -> None:
    store = HashStore()
    later = threading.Timer(PATIENCE / 3, lambda: [answer(store, rank) for rank in (1, 2, 3)])
    later.start()
    began = time.monotonic()
    assert absent(store, 0, FOUR, patience=30) == []
    assert time.monotonic() - began < 10, "all are there, and it waited on"
    later.join()


@pytest.mark.parametrize("kind", [Silent, Gone])
def test_a_silent_store_means_the_rank_that_holds_it(silent: Silent, kind: type) -> None:
    store = silent if kind is Silent else kind()
    began = time.monotonic()
    assert absent(store, 2, FOUR, PATIENCE) == [0]
    assert time.monotonic() - began < 10 * PATIENCE


def test_answering_a_silent_store_ends() -> None:
    class Full(Silent):
        def set(self, key: str, value: str) -> None:
            self.end.wait()

    store = Full()
    answer(store, 1, PATIENCE)
    store.end.set()
