"""What an attention rank must know of a model rank's step: which rows, and where their keys and
values lie.  It travels once a step, before the first layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

HEADER = 4
"""Values of what goes ahead: whether the step extends, requests, rows, pages."""


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

    @classmethod
    def of(
        cls,
        extends: bool,
        lengths: torch.Tensor,
        new: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        page: int,
    ) -> StepTables:
        """Read the pages off a table of slots.

        Args:
            table: [B, at least the longest length]: the slot of every token of each request.
            page: tokens of a page; the slots of a page follow one another.
        """
        rows = zip(table, lengths.tolist(), strict=True)
        pages = [row[:length:page] for row, length in rows]
        return cls(extends, lengths, new, slots, torch.cat(pages))

    def pack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What travels: the header, [`HEADER`] int64, and the body, int32."""
        header = [self.extends, len(self.lengths), len(self.slots), len(self.pages)]
        parts = (self.lengths, self.new, self.slots, self.pages)
        return torch.tensor(header), torch.cat([part.to(torch.int32) for part in parts]).cpu()

    @staticmethod
    def body(header: torch.Tensor) -> torch.Tensor:
        """Room for the body that follows `header`.

        Raises:
            ValueError: no rank sends such a header.
        """
        _, requests, rows, pages = sizes = header.tolist()
        if min(sizes) < 0 or not 0 < requests <= rows or pages < requests:
            raise ValueError(f"a step of {requests} requests, {rows} rows and {pages} pages")
        return torch.empty(2 * requests + rows + pages, dtype=torch.int32)

    @classmethod
    def unpack(cls, header: torch.Tensor, body: torch.Tensor) -> StepTables:
        """Inverse of `pack`."""
        extends, requests, rows, pages = header.tolist()
        parts = body.to(torch.int64).split([requests, requests, rows, pages])
        return cls(bool(extends), *parts)

    def table(self, page: int, base: int) -> list[torch.Tensor]:
        """The slot of every token of each request, `base` added to all."""
        counts = (-(-self.lengths // page)).tolist()
        within = torch.arange(page)
        return [
            (pages.unsqueeze(1) + within).flatten()[:length] + base
            for pages, length in zip(self.pages.split(counts), self.lengths.tolist(), strict=True)
        ]
