"""Ranks tell each other data, of any length, and nothing that is not data."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from sglang_afd.upstream import gather as module
from sglang_afd.upstream.gather import gather

pytestmark = pytest.mark.unit

RANKS = 3


class Told(msgspec.Struct):
    """Something of a type of its own."""

    name: str
    bytes: int | None


class Group:
    """Stands for a process group whose ranks are threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.given: dict[int, torch.Tensor] = {}


def together(monkeypatch: pytest.MonkeyPatch, call: Any) -> list[Any]:
    """``call(rank, group)`` on every rank at the same time."""
    group, place = Group(), threading.local()

    def all_gather(into: list[torch.Tensor], mine: torch.Tensor, group: Group) -> None:
        group.given[place.rank] = mine
        group.barrier.wait()
        for rank, tensor in enumerate(into):
            tensor.copy_(group.given[rank])
        group.barrier.wait()

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS)

    def run(rank: int) -> Any:
        place.rank = rank
        return call(rank, group)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def test_every_rank_learns_what_all_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [Told("short", 1), Told("ü" * 5000, None), Told("", 2**62)]
    got = together(monkeypatch, lambda rank, group: gather(mine[rank], Told, group))
    assert got == [mine] * RANKS


@pytest.mark.parametrize(
    ("strange", "why"),
    [({"name": 5}, "is no"), ({"name": "x" * 300, "bytes": 1}, "were expected")],
    ids=["another type", "too much"],
)
def test_what_is_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, strange: Any, why: str
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 200)

    def call(rank: int, group: Group) -> str:
        with pytest.raises(ValueError) as refused:
            gather(strange if rank == 1 else Told("a", 1), Told, group)
        return str(refused.value)

    assert all(why in message for message in together(monkeypatch, call))
