"""The split plan in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_afd.kernels.splits import BEGIN, TILE


def cost(tiles: Sequence[int], size: int, kv_heads: int, processors: int) -> int:
    """Of pieces of `size` tiles: see `sglang_afd.kernels.splits.plan_splits`."""
    pieces = kv_heads * sum(math.ceil(each / size) for each in tiles)
    return math.ceil(pieces / processors) * (size + BEGIN)


def splits(lengths: Sequence[int], kv_heads: int, processors: int, most: int) -> list[int]:
    """How often each request is split."""
    tiles = [max(1, math.ceil(length / TILE)) for length in lengths]
    sizes = [math.ceil(max(tiles) / parts) for parts in range(1, most + 1)]
    best = min(sizes, key=lambda size: cost(tiles, size, kv_heads, processors))
    return [math.ceil(each / best) for each in tiles]
