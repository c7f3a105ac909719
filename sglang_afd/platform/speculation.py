"""Where SGLang's EAGLE worker needs a GPU's kernels, and what the CPU platform gives instead; see
also `sglang_afd.platform.settings`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_afd.platform import draft_slots, draft_trees
from sglang_afd.upstream.hooks import Hook, Kind

_OPS = "sglang.kernels.ops.speculative"
_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def verify_trees(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    batch: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """PyTorch's attention of an extend, for tokens to verify too."""
    if not batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, batch, *args, **kwargs)
    from sglang_afd.platform.draft_attention import verify

    return verify(backend, q, k, v, layer, batch)


def draft_steps(factory: Any) -> Any:
    """The attention of a draft's steps but the last; None: there are none."""
    from sglang_afd.platform.draft_attention import DraftSteps

    steps = factory.speculative_num_steps
    return DraftSteps(factory.draft_model_runner, factory.topk, steps) if steps > 1 else None


def as_the_draft_runs(factory: Any) -> None:
    """None: a draft's extend runs on its own runner's attention."""


def move_slots(pool: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    """Copy keys and values of all layers from the slots `src_loc` to the slots `tgt_loc`."""
    from sglang.srt.mem_cache.memory_pool import move_kv_cache_native

    move_kv_cache_native(pool.k_buffer, pool.v_buffer, tgt_loc, src_loc)


def no_copy_kernel(pool: Any) -> None:
    """A pool whose slots are copied in speculation compiles nothing for that."""
    pool._kv_copy_config = None


def rows_of(indices: torch.Tensor, *tables: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The rows `indices` of each table, which has one for every request; None stays None."""
    return tuple(None if table is None else table[indices] for table in tables)


_REPLACED: dict[str, Callable[..., Any]] = {
    f"{_OPS}.spec_tree.build_tree_kernel_efficient_func": draft_trees.build_tree,
    f"{_OPS}.spec_tree.verify_tree_greedy_func": draft_trees.verify_greedy,
    f"{_OPS}.cache_locs.assign_draft_cache_locs_contiguous_func": draft_slots.of_drafts,
    f"{_OPS}.cache_locs.fill_front_out_cache_loc_func": draft_slots.of_first,
    f"{_OPS}.eagle.fill_accept_out_cache_loc_func": draft_slots.of_accepted,
    f"{_OPS}.eagle.fill_bonus_tokens_func": draft_slots.last_accepted,
    f"{_OPS}.gather_spec_extras.gather_spec_extras": rows_of,
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": draft_slots.reserve,
    f"{_POOL}._init_kv_copy_and_warmup": no_copy_kernel,
    f"{_POOL}._move_kv_cache_impl": move_slots,
    f"{_FACTORY}.create_decode_backend": draft_steps,
    f"{_FACTORY}.create_draft_extend_backend": as_the_draft_runs,
}
"""What SGLang has a GPU's or sgl-kernel's code for -> the same in PyTorch."""

HOOKS: tuple[Hook, ...] = (
    *(
        Hook(target, Kind.REPLACE, fn, "EAGLE runs CUDA or Triton kernels")
        for target, fn in _REPLACED.items()
    ),
    Hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        Kind.AROUND,
        verify_trees,
        "PyTorch's attention knows no tokens to verify",
    ),
)
