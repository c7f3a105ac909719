"""Routing of emulated ranks' rows: draws that a rank makes once, and takes in turn."""

from __future__ import annotations

import torch

from sglang_afd.config import MOST_LANES
from sglang_afd.emulation import DRAWS, SEED, Emulation


def draw(
    emulation: Emulation, rank: int, *, cap: int, num_experts: int, top_k: int, lane: int = 0
) -> torch.Tensor:
    """[DRAWS, S, cap, K] int32 global ids of the rows of the S sources that `rank` stands for.

    Each row's experts differ and are drawn uniformly from all experts of the whole deployment, row
    by row and independently of any router's choice.
    """
    # the generator takes 32 bits of a seed
    generator = torch.Generator().manual_seed(SEED + MOST_LANES * rank + lane)
    rows = DRAWS * len(emulation.emulated_by(rank)) * cap
    ids = torch.empty(rows, top_k, dtype=torch.int32)
    for block in ids.split(1 << 14):  # scores of all rows at once would take gigabytes
        scores = torch.rand(block.shape[0], num_experts, generator=generator)
        block.copy_(scores.topk(top_k, dim=1).indices)
    return ids.view(DRAWS, -1, cap, top_k)
