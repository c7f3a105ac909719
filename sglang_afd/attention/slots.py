"""Which of an expert's slots a row goes to, where experts have several."""

from __future__ import annotations

import torch


class SlotChoice(torch.nn.Module):
    """Shares an expert's rows out among its slots: in turn by row, and by rank.

    The choice depends on the row's place alone, so that equal steps give equal bits.
    """

    table: torch.Tensor
    counts: torch.Tensor

    def __init__(self, slots: list[list[int]], rank: int, most: int) -> None:
        """Keep the slots of each expert on the device on which modules are being made.

        Args:
            rank: begins its turns one slot after the rank before it.
            most: slots that an expert can have.
        """
        super().__init__()
        self.register_buffer("table", torch.empty(len(slots), most).long(), persistent=False)
        self.register_buffer("counts", torch.empty(len(slots)).long(), persistent=False)
        self._rank = rank
        self.use(slots)

    def use(self, slots: list[list[int]]) -> None:
        """Choose among other slots from now on, in recorded CUDA graphs too."""
        most = self.table.shape[1]
        filled = [row + row[:1] * (most - len(row)) for row in slots]
        self.table.copy_(torch.tensor(filled))
        self.counts.copy_(torch.tensor([*map(len, slots)]))

    def forward(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """[n, K] expert ids, negative = none -> [n, K] slots, of the same type."""
        known = expert_ids.clamp(min=0).long()
        turns = torch.arange(known.shape[0], device=known.device) + self._rank
        slots = self.table[known, turns.unsqueeze(1) % self.counts[known]]
        return torch.where(expert_ids < 0, expert_ids, slots.to(expert_ids.dtype))
