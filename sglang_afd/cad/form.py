"""What travels for one attention layer, and which part of it each attention rank gets.

Every input and the output is a row for each token, of equal parts for each head; an attention rank
has a contiguous share of the key-value heads, and of all else in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Form(NamedTuple):
    """Widths of a layer's rows, of all heads."""

    layer: int
    """The decoder layer's index."""
    inputs: tuple[int, ...]
    output: int

    def share(self, ranks: int) -> Form:
        """What one of so many attention ranks gets and gives."""
        return Form(
            self.layer, tuple(width // ranks for width in self.inputs), self.output // ranks
        )


def scatter(inputs: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """The rows for each attention rank: its share of every input, side by side.

    Args:
        inputs: [n, width] each.
    """
    shares = zip(*(rows.chunk(ranks, dim=1) for rows in inputs), strict=True)
    return [torch.cat(share, dim=1).contiguous() for share in shares]
