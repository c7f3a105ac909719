"""What an attention rank must know of a model rank's step: which rows, and where their keys, values
and recurrent states lie.  It travels once a step, before the first layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

HEADER = 6
"""Values of what goes ahead: whether the step extends; requests, rows, pages; whether there are
recurrent states; changes of them."""
CLEAR = -1
"""In the place of the slot that is copied: the other one becomes zero."""


class StateTables(NamedTuple):
    """Recurrent states of one model rank's requests (of linear attention), by their slots.

    All [B] int64, but the last.
    """

    slots: torch.Tensor
    keep: torch.Tensor
    """Where a copy goes of what the state is on the way; negative: none is wanted."""
    at: torch.Tensor
    """Of a prefill: after how many tokens that is."""
    changes: torch.Tensor
    """[C, 2] int64: (from, to) copies and (`CLEAR`, to) in order, before the step."""


class StepTables(NamedTuple):
    """One model rank's requests in a step, in its batch's order.

    Slots are places in the KV pool, as the model rank's allocator numbers them.
    """

    extends: bool
    """A prefill (of one or more rows for each request); else each request decodes one row."""
    lengths: torch.Tensor
    """[B] int64: tokens of each request once the step has stored its rows."""
    new: torch.Tensor
    """[B] int64: how many of them are rows of this step, the last ones."""
    slots: torch.Tensor
    """[R] int64: where the keys and values of the step's rows go."""
    pages: torch.Tensor
    """[P] int64: the first slot of every page of each request in turn."""
    states: StateTables | None = None
    """None: the model has no recurrent states."""

    @classmethod
    def of(
        cls,
        extends: bool,
        lengths: torch.Tensor,
        new: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        page: int,
        states: StateTables | None = None,
    ) -> StepTables:
        """Read the pages off a table of slots.

        Args:
            table: [B, at least the longest length]: the slot of every token of each request.
            page: tokens of a page; the slots of a page follow one another.
        """
        rows = zip(table, lengths.tolist(), strict=True)
        pages = [row[:length:page] for row, length in rows]
        return cls(extends, lengths, new, slots, torch.cat(pages), states)

    def pack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What travels: the header, [`HEADER`] int64, and the body, int32."""
        parts: Sequence[torch.Tensor] = (self.lengths, self.new, self.slots, self.pages)
        changes = 0
        if self.states is not None:
            changes = len(self.states.changes)
            parts = (*parts, *self.states[:-1], self.states.changes.flatten())
        sizes = [len(self.lengths), len(self.slots), len(self.pages)]
        header = [self.extends, *sizes, self.states is not None, changes]
        return torch.tensor(header), torch.cat([part.to(torch.int32) for part in parts]).cpu()

    @staticmethod
    def body(header: torch.Tensor) -> torch.Tensor:
        """Room for the body that follows `header`.

        Raises:
            ValueError: no rank sends such a header.
        """
        _, requests, rows, pages, *_ = header.tolist()
        if min(header.tolist()) < 0 or not 0 < requests <= rows or pages < requests:
            raise ValueError(f"a step of {requests} requests, {rows} rows and {pages} pages")
        return torch.empty(sum(_sizes(header)), dtype=torch.int32)

    @classmethod
    def unpack(cls, header: torch.Tensor, body: torch.Tensor) -> StepTables:
        """Inverse of `pack`."""
        lengths, new, slots, pages, *rest = body.to(torch.int64).split(_sizes(header))
        states = None
        if rest:
            places, keep, at, changes = rest
            states = StateTables(places, keep, at, changes.view(-1, 2))
        return cls(bool(header[0]), lengths, new, slots, pages, states)

    def table(self, page: int, base: int) -> list[torch.Tensor]:
        """The slot of every token of each request, `base` added to all."""
        counts = (-(-self.lengths // page)).tolist()
        within = torch.arange(page)
        return [
            (pages.unsqueeze(1) + within).flatten()[:length] + base
            for pages, length in zip(self.pages.split(counts), self.lengths.tolist(), strict=True)
        ]


def _sizes(header: torch.Tensor) -> list[int]:
    """Of the parts of a body."""
    _, requests, rows, pages, states, changes = header.tolist()
    of_states = [requests] * 3 + [2 * changes] if states else []
    return [requests, requests, rows, pages, *of_states]
