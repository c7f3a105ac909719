"""Process groups that AFD adds to SGLang's world."""

from __future__ import annotations

from typing import Any

from sglang_afd.context import current

_attention_group: Any = None


def make_attention_group() -> None:
    """Create the CPU group of the ranks that hold requests: a collective call of all ranks."""
    import torch.distributed as dist

    global _attention_group
    _attention_group = dist.new_group(list(current().topology.leading_world), backend="gloo")


def attention_group() -> Any:
    """The CPU group of the A ranks (CAD: the model ranks)."""
    return _attention_group
