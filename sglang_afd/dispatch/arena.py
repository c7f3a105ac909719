"""CUDA symmetric memory as an `Arena`: every GPU of the host maps every other one's."""

from __future__ import annotations

from typing import Any

import torch

from sglang_afd.dispatch.channel import Arena

_kept: list[Any] = []  # mappings of peers' memory end with the objects that made them


def symmetric_arena(size: int, group: Any) -> Arena:
    """An arena of `size` bytes on each rank of `group`: a collective call of all its ranks.

    Raises:
        RuntimeError: a GPU cannot reach another one's memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    local = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    local.zero_()
    torch.cuda.synchronize()  # before any peer may write into it
    mapped = symmetric_memory.rendezvous(local, group)
    torch.distributed.barrier(group)
    _kept.append(mapped)
    return Arena(local, tuple(mapped.buffer_ptrs))
