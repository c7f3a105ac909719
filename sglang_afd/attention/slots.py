"""Which of an expert's slots a row goes to, where experts have several."""

from __future__ import annotations

import torch


class SlotChoice(torch.nn.Module):
    """Shares an expert's rows out among its slots: in turn by row, and by rank.

    The choice depends on the row's place alone, so that equal steps give equal bits.
    """

    table: torch.Tensor
    counts: torch.Tensor

    def __init__(self, slots: list[list[int]], rank: int) -> None:
        """Keep the slots of each expert on the device on which modules are being made.

        Args:
            rank: begins its turns one slot after the rank before it.
        """
        super().__init__()
        most = max(map(len, slots))
        filled = [row + row[:1] * (most - len(row)) for row in slots]
        self.register_buffer("table", torch.tensor(filled), persistent=False)
        self.register_buffer("counts", torch.tensor([*map(len, slots)]), persistent=False)
        self._rank = rank

    def forward(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """[n, K] expert ids, negative = none -> [n, K] slots, of the same type."""
        known = expert_ids.clamp(min=0).long()
        turns = torch.arange(known.shape[0], device=known.device) + self._rank
        slots = self.table[known, turns.unsqueeze(1) % self.counts[known]]
        return torch.where(expert_ids < 0, expert_ids, slots.to(expert_ids.dtype))
