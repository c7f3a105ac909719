"""What was freed of KV pages, request slots and slots of recurrent state is handed out again only
when no step may write to it.

Several lanes' steps are under way at once (see `sglang_afd.lanes`).  What is held counts
as available, so that admission, eviction and leak checks see the numbers they would see with one
lane; an allocation that needs it makes the stream wait for the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from sglang_afd.context import current
from sglang_afd.lanes import Quarantine
from sglang_afd.upstream.hooks import Hook, Kind

_ALLOCATOR = "sglang.srt.mem_cache.allocator"
_TOKENS = f"{_ALLOCATOR}.token.TokenToKVPoolAllocator"
_PAGES = f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator"
_SLOTS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
_STATES = f"{_ALLOCATOR}.mamba.MambaSlotAllocator"

_quarantines: WeakKeyDictionary[Any, Quarantine] = WeakKeyDictionary()


def give_back_ended() -> None:
    """Return to every pool what no step may write to any more."""
    for quarantine in _quarantines.values():
        quarantine.give_back_ended()


def _of(pool: Any) -> Quarantine:
    if pool not in _quarantines:
        _quarantines[pool] = Quarantine(current().steps)
    return _quarantines[pool]


def _free_tokens(original: Callable[..., None], pool: Any, indices: Any) -> None:
    if pool.free_group is not None or not indices.numel():
        original(pool, indices)  # the group is freed as a whole later, through here
        return
    kept = indices.clone()  # the caller may write into what it gave
    _of(pool).free(kept.numel(), lambda: original(pool, kept))


def _free_pages(original: Callable[..., None], pool: Any, *page_ids: Any) -> None:
    kept = [ids.clone() for ids in page_ids]
    size = sum(ids.numel() for ids in kept) * pool.page_size
    _of(pool).free(size, lambda: original(pool, *kept))


def _free_slots(original: Callable[..., None], pool: Any, indices: list[int]) -> None:
    kept = list(indices)
    _of(pool).free(len(kept), lambda: original(pool, kept))


def _free_states(original: Callable[..., None], pool: Any, indices: Any) -> None:
    kept = indices.clone()
    _of(pool).free(kept.numel(), lambda: original(pool, kept))


def _with_held(available: int, pool: Any) -> int:
    return available + _of(pool).size


def _allocate(original: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
    _of(pool).give_back_ended()
    found = original(pool, *args, **kwargs)
    if found is None and _of(pool).size:
        _of(pool).give_back_all()
        found = original(pool, *args, **kwargs)
    return found


def _clear(_: None, pool: Any) -> None:
    _of(pool).clear()


HOOKS: tuple[Hook, ...] = (
    *(
        Hook(target, Kind.AROUND, free, "a step launched before may still write there")
        for target, free in (
            (f"{_TOKENS}.free", _free_tokens),
            (f"{_PAGES}._release_page_ids", _free_pages),
            (f"{_SLOTS}.free_rows", _free_slots),
            (f"{_STATES}.free", _free_states),
        )
    ),
    *(
        Hook(
            f"{target}.available_size",
            Kind.AFTER,
            _with_held,
            "what is held is free memory: it can be had by waiting for a step",
        )
        for target in (_TOKENS, _PAGES, _SLOTS, _STATES)
    ),
    *(
        Hook(target, Kind.AROUND, _allocate, "what is held is handed out once its steps end")
        for target in (
            f"{_TOKENS}.alloc",
            *(f"{_PAGES}.{name}" for name in ("alloc", "alloc_extend", "alloc_decode")),
            f"{_SLOTS}.alloc_rows",
            f"{_STATES}.alloc",
        )
    ),
    *(
        Hook(f"{target}.clear", Kind.AFTER, _clear, "a cleared pool has everything again")
        for target in (_TOKENS, _PAGES, _SLOTS, _STATES)
    ),
)
