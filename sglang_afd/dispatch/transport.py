"""What moves rows between the roles: the Transport protocol.

One *round* moves at most T rows a rank: A ranks call `dispatch` then `combine`, F ranks call
`receive`, run their experts, then `reply`.  All ranks take part in every round of the step plan, in
the same order, also with no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


class RoutedRows(NamedTuple):
    """Rows of one rank with their routing.

    hidden: [n, H]; expert_ids: [n, K] integer, global ids, negative = no expert in that place;
    weights: [n, K] float32, the router's.
    """

    hidden: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor


class RowBatch(NamedTuple):
    """What an F rank received, a row per (token, F rank), the router's weights still to apply.

    hidden: [R, H]; expert_ids: [R, K] integer, *local* ids, -1 = not one of this rank's experts;
    weights: [R, K] float32.
    """

    hidden: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor


class MaskedBatch(NamedTuple):
    """What an F rank received, grouped by expert, a row per (token, expert); A applies the weights.

    hidden: [E_local, M, H]; scales: block scales of FP8 rows, or None; counts: [E_local] int32 on
    the device, valid rows of each expert; expected: rows of an expert to expect (a tiling hint).
    """

    hidden: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    expected: int


@dataclass(frozen=True)
class Buffers:
    """Bytes that a transport holds on one rank of each role, per lane."""

    attention: int
    ffn: int


class Transport(Protocol):
    """Moves the rows of one round; a transport serves one role's calls on its rank."""

    def dispatch(self, rows: RoutedRows) -> Any:
        """A: send rows to the F ranks that own their experts; return a handle for `combine`."""

    def combine(self, handle: Any) -> torch.Tensor:
        """A: return [n, H], each row the weighted sum of its experts' outputs."""

    def receive(self, counts: Sequence[int]) -> tuple[RowBatch | MaskedBatch, Any]:
        """F: take the rows that world rank r sends, counts[r] of them; and a handle for `reply`."""

    def reply(self, output: torch.Tensor, handle: Any) -> None:
        """F: send back the experts' output, shaped like the received batch's `hidden`."""


class ExchangeError(RuntimeError):
    """An exchange with a peer failed or timed out; the message names both ranks and the mend."""
