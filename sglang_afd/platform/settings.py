"""Values inside SGLang's modules that choose a plain-PyTorch branch which is already there.

No function can be hooked for these: each is a module's own flag or table entry, read in the middle
of a long function.  `CpuReferencePlatform.init_backend` applies them in every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch

from sglang_afd.platform import draft_trees


@dataclass(frozen=True)
class Setting:
    """One value to set: where, what (called once, when applied), and why (one line)."""

    target: str
    value: Callable[[], Any]
    why: str
    adds: bool = False  # the owner has no such attribute of its own yet


def _memcpy_cpu() -> Any:
    from sglang.srt.layers.dp_attention import memcpy_cpu

    return memcpy_cpu


def _unpinned(self: torch.Tensor) -> torch.Tensor:
    """The tensor as it is: host memory is the device's."""
    return self


def _padded_length(self: object) -> int:
    """KV length of a padding row: its one token is the pool's slot 0, which no request owns."""
    return 1


def _the(value: Any) -> Any:
    return value


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "sglang.srt.model_executor.forward_batch_info._is_cpu",
        lambda: True,
        "DP padding pins the token counts in host memory, which needs an accelerator's driver",
    ),
    Setting(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
        ".get_cpu_graph_seq_len_fill_value",
        lambda: _padded_length,
        "DP padding asks the attention backend for the KV length of a padding row",
        adds=True,
    ),
    Setting(
        "torch.Tensor.pin_memory",
        lambda: _unpinned,
        "decode steps pin which states to keep, which needs an accelerator's driver",
        adds=True,
    ),
    Setting(
        "sglang.srt.layers.dp_attention.memcpy_func",
        _memcpy_cpu,
        "DP gather and scatter copy rows with a Triton kernel",
    ),
    Setting(
        "sglang.srt.models.qwen3_5._GDN_FUSED_QKVZBA_RATIOS",
        tuple,
        "gated DeltaNet splits its projections with a Triton kernel",
    ),
    *(
        Setting(
            f"sglang.srt.speculative.eagle_utils.{name}",
            partial(_the, fn),
            "sampling from a tree of drafts has CUDA kernels alone",
        )
        for name, fn in (
            ("tree_speculative_sampling_target_only", draft_trees.sample_tree),
            ("top_k_renorm_prob", draft_trees.keep_top_k),
            ("top_p_renorm_prob", draft_trees.keep_top_p),
        )
    ),
    Setting(
        "sglang.srt.distributed.parallel_state._is_cpu",
        lambda: True,
        "all-gather and reduce-scatter go through custom ops that have no CPU implementation",
    ),
)


def apply_settings() -> None:
    """Set every value of `SETTINGS`.

    Raises:
        RuntimeError: SGLang has no such attribute (or already has one that would be added).
    """
    for setting in SETTINGS:
        owner_path, _, name = setting.target.rpartition(".")
        owner = resolve_name(owner_path)
        if (name in vars(owner)) == setting.adds:
            state = "already has" if setting.adds else "has no"
            raise RuntimeError(
                f"the CPU platform cannot be set up: SGLang {state} {setting.target} "
                f"({setting.why}); install the pinned SGLang version"
            )
        setattr(owner, name, setting.value())
