"""SGLang's pools hand out what was freed only after the steps launched before the free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_afd.lanes import StepsInFlight
from sglang_afd.upstream import quarantine
from sglang_afd.upstream.hooks import Hook, Kind
from tests.unit.test_lanes import Step

pytestmark = pytest.mark.unit

SIZE, PAGE = 16, 4


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepsInFlight]:
    """A rank's steps, with the hooks installed on SGLang's classes for the test."""
    found = StepsInFlight()
    monkeypatch.setattr(quarantine, "current", lambda: SimpleNamespace(steps=found))
    quarantine._quarantines.clear()
    owners = {
        owner.__name__: owner
        for owner in (
            TokenToKVPoolAllocator,
            PagedTokenToKVPoolAllocator,
            ReqToTokenPool,
            MambaSlotAllocator,
        )
    }
    for hook in quarantine.HOOKS:
        *_, owner, name = hook.target.split(".")
        original = getattr(owners[owner], name)
        monkeypatch.setattr(owners[owner], name, hooked(hook, original))
    yield found


def hooked(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    if hook.kind is Kind.AROUND:
        return lambda *args, **kwargs: hook.fn(original, *args, **kwargs)

    def after(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        changed = hook.fn(result, *args, **kwargs)
        return result if changed is None else changed

    return after


def tokens() -> Any:
    return TokenToKVPoolAllocator(SIZE, torch.float32, "cpu", None, need_sort=False)


def pages() -> Any:
    return PagedTokenToKVPoolAllocator(SIZE, PAGE, torch.float32, "cpu", None, need_sort=False)


@pytest.mark.parametrize("make", [tokens, pages])
def test_freed_kv_counts_as_free_but_is_not_handed_out(
    steps: StepsInFlight, make: Callable[[], Any]
) -> None:
    pool, step = make(), Step()
    mine, rest = pool.alloc(PAGE), pool.alloc(SIZE - 2 * PAGE)
    steps.launched(1, step)
    pool.free(mine)
    assert pool.available_size() == 2 * PAGE
    other = pool.alloc(PAGE)
    assert set(other.tolist()).isdisjoint(mine.tolist()) and not step.waited
    again = pool.alloc(PAGE)
    assert sorted(again.tolist()) == sorted(mine.tolist()) and step.waited == 1
    assert pool.available_size() == 0 and pool.alloc(PAGE) is None
    step.ended = True
    pool.free(rest)
    assert pool.available_size() == SIZE - 2 * PAGE


def states() -> Any:
    return MambaSlotAllocator(SIZE, "cpu")


def reuse_of_a_freed_state() -> tuple[list[int], list[int], Step]:
    """A slot that a lane's step may still write to is freed, and the pool gives one out.

    Returns:
        the slot that was freed, the one that the next request gets, and the step.
    """
    pool, step = states(), Step()
    others = pool.alloc(SIZE - 1)
    [freed], current = pool.alloc(1).tolist(), quarantine.current()
    current.steps.launched(1, step)
    pool.free(torch.tensor([freed]))
    assert pool.available_size() == 1 and pool.schedulable_available_size() == 1
    [given] = pool.alloc(1).tolist()
    assert len(others) == SIZE - 1
    return [freed], [given], step


def test_a_freed_state_is_handed_out_behind_the_steps_that_may_write_there(
    steps: StepsInFlight,
) -> None:
    freed, given, step = reuse_of_a_freed_state()
    assert given == freed and step.waited == 1


def test_without_the_hooks_a_state_is_written_by_two_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault that the quarantine mends."""
    found = SimpleNamespace(steps=StepsInFlight())
    monkeypatch.setattr(quarantine, "current", lambda: found)
    freed, given, step = reuse_of_a_freed_state()
    assert given == freed and not step.waited and not step.ended


def test_freed_states_count_as_free_but_are_not_handed_out(steps: StepsInFlight) -> None:
    pool, step = states(), Step()
    mine, rest = pool.alloc(4), pool.alloc(SIZE - 8)
    wanted = sorted(mine.tolist())
    steps.launched(1, step)
    pool.free(mine)
    mine.fill_(-1)
    assert pool.available_size() == 8
    other = pool.alloc(4)
    assert set(other.tolist()).isdisjoint(wanted) and not step.waited
    assert pool.alloc(5) is None
    assert sorted(pool.alloc(4).tolist()) == wanted and step.waited
    assert pool.available_size() == 0 and pool.alloc(1) is None
    step.ended = True
    pool.free(rest)
    assert pool.available_size() == len(rest) == len(pool.alloc(len(rest)))


def test_states_drawn_ahead_for_a_queue_wait_too(steps: StepsInFlight) -> None:
    """SGLang draws a slot for each waiting request at once, and returns those that none took."""
    pool, step = states(), Step()
    running = pool.alloc(SIZE - 2)
    pool.alloc_group_begin(2)
    first = pool.alloc(1)
    steps.launched(0, step)
    pool.alloc_group_end()
    pool.free(running[:1])
    assert pool.available_size() == 2
    pool.alloc_group_begin(2)  # more than what no step may write to: each is drawn by itself
    assert step.waited == 0
    second, third = pool.alloc(1), pool.alloc(1)
    assert step.waited > 0
    pool.alloc_group_end()
    assert len({*first.tolist(), *second.tolist(), *third.tolist()}) == 3
    assert third.item() not in running[1:].tolist() and pool.available_size() == 0


@pytest.mark.parametrize("make", [tokens, pages, states])
def test_an_ended_step_holds_nothing_up(steps: StepsInFlight, make: Callable[[], Any]) -> None:
    pool, step = make(), Step()
    everything = pool.alloc(SIZE)
    steps.launched(0, step)
    pool.free(everything)
    step.ended = True
    assert len(pool.alloc(SIZE)) == SIZE and not step.waited


@pytest.mark.parametrize("make", [tokens, pages])
def test_a_group_is_held_as_a_whole_and_as_it_was(
    steps: StepsInFlight, make: Callable[[], Any]
) -> None:
    pool, step = make(), Step()
    first, second = pool.alloc(PAGE), pool.alloc(PAGE)
    wanted = sorted([*first.tolist(), *second.tolist()])
    steps.launched(0, step)
    pool.free_group_begin()
    pool.free(first)
    pool.free(second)
    assert pool.available_size() == SIZE - 2 * PAGE
    pool.free_group_end()
    assert pool.available_size() == SIZE
    pool.free(pool.alloc(PAGE))
    first.fill_(-1)
    second.fill_(-1)
    step.ended = True
    quarantine.give_back_ended()
    assert set(wanted) <= set(pool.alloc(SIZE).tolist())


def test_what_is_held_is_what_was_freed(steps: StepsInFlight) -> None:
    """The caller may write into the tensor that it freed."""
    pool, step = tokens(), Step()
    mine = pool.alloc(SIZE)
    steps.launched(0, step)
    pool.free(mine)
    mine.fill_(-1)
    step.ended = True
    assert sorted(pool.alloc(SIZE).tolist()) == list(range(1, SIZE + 1))


def test_pages_of_a_decode_step_are_those_that_no_step_may_write_to(steps: StepsInFlight) -> None:
    pool, step = pages(), Step()
    held = pool.alloc(SIZE)
    steps.launched(0, step)
    pool.free(held)
    lengths = torch.tensor([1])
    loc = pool.alloc_decode(lengths, lengths, torch.tensor([-1]))
    assert loc is not None and step.waited > 0


def test_request_slots_wait_too(steps: StepsInFlight) -> None:
    pool, step = ReqToTokenPool(3, 8, "cpu", enable_memory_saver=False), Step()
    one, two, three = (pool.alloc_rows(1) for _ in range(3))
    steps.launched(2, step)
    pool.free_rows(two)
    assert pool.available_size() == 1
    assert pool.alloc_rows(2) is None and step.waited == 1
    assert pool.alloc_rows(1) == two
    step.ended = True
    pool.free_rows([*one, *three])
    assert sorted(pool.free_slots) == sorted([*one, *three])


@pytest.mark.parametrize("make", [tokens, pages, states])
def test_a_cleared_pool_has_everything_once(steps: StepsInFlight, make: Callable[[], Any]) -> None:
    pool, step = make(), Step()
    steps.launched(0, step)
    pool.free(pool.alloc(PAGE))
    pool.clear()
    assert pool.available_size() == SIZE
    step.ended = True
    quarantine.give_back_ended()
    assert len(set(pool.alloc(SIZE).tolist())) == SIZE and pool.available_size() == 0
