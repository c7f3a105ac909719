"""CAD: the recurrent states of linear attention lie on attention ranks, their slots are numbered by
the model ranks.

A model rank's pool of states has no layers.  What SGLang would do to a state there between or
before forwards (clear it, copy it) is noted, and travels with the rank's next step, in order:
nothing but its own forwards comes in between.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_afd.cad.tables import CLEAR, StateTables, StepTables
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.roles import on_model

_changes: list[tuple[int, int]] = []


def tables_of(batch: Any, pool: Any) -> StateTables | None:
    """Where the states of a model rank's batch lie, and what has been noted since the last."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    if not isinstance(pool, HybridReqToTokenPool):
        return None
    slots = pool.get_mamba_indices(batch.req_pool_indices).to(torch.int64)
    nowhere = torch.full_like(slots, -1)
    keep = nowhere
    if batch.mamba_track_mask is not None:
        keep = torch.where(batch.mamba_track_mask, batch.mamba_track_indices.to(slots), nowhere)
    at = nowhere if batch.mamba_track_seqlens is None else batch.mamba_track_seqlens
    noted = torch.tensor(_changes, dtype=torch.int64).view(-1, 2)
    _changes.clear()
    return StateTables(slots, keep, at, noted)


def take(step: StepTables, pool: Any, rows: range, base: int) -> dict[str, Any]:
    """On an attention rank: change states as `step` says, and place its requests' in `pool`.

    Args:
        rows: of the requests in the pool's table.
        base: to add to the model rank's slots.

    Returns:
        what SGLang's batch has of states.
    """
    if step.states is None:
        return {}
    slots, keep, at, changes = step.states
    for source, target in changes.tolist():
        to = torch.tensor([target + base])
        if source == CLEAR:
            pool.mamba_pool.clear_slots(to)
        else:
            pool.mamba_pool.copy_from(torch.tensor([source + base]), to)
    mapping = pool.req_index_to_mamba_index_mapping
    mapping[rows.start : rows.stop] = (slots + base).to(mapping)
    return {
        "mamba_track_mask": keep >= 0,
        "mamba_track_indices": torch.where(keep >= 0, keep + base, keep),
        "mamba_track_seqlens": at if step.extends else None,
    }


@on_model
def _note_cleared(pool: Any, indices: torch.Tensor) -> None:
    _changes.extend((CLEAR, slot) for slot in indices.tolist())


@on_model
def _note_copied(pool: Any, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
    _changes.extend(zip(src_indices.tolist(), dst_indices.tolist(), strict=True))


@on_model
def _no_states(configurator: Any) -> list[int]:
    return []


_POOL = "sglang.srt.mem_cache.memory_pool.MambaPool"
HOOKS = (
    Hook(
        f"{_POOL}.clear_slots",
        Kind.AROUND,
        _note_cleared,
        "the states are on attention ranks, which clear them before the next step",
    ),
    Hook(
        f"{_POOL}.copy_from",
        Kind.AROUND,
        _note_copied,
        "the states are on attention ranks, which copy them before the next step",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
        "._get_mamba_layer_ids_for_req_pool",
        Kind.AROUND,
        _no_states,
        "model ranks number states and keep none",
    ),
)
