"""What moves rows between the roles: the Transport protocol.

In every round of the step plan, A ranks that join it call `dispatch` then `combine`; F ranks call
`receive`, run their experts, then `reply`.  All ranks go through the rounds in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from sglang_afd.dispatch.step_plan import Caps, Round


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


def nothing() -> None:
    """Nobody wants to know."""


class Transport(Protocol):
    """Moves the rows of a round; a transport serves one role's calls on its rank."""

    caps: Caps
    """Rows that it carries in one round."""
    graphs: bool
    """Whether its decode rounds can be recorded in CUDA graphs, of any rank's own, and replayed
    between others that are not: how many rows there are is read on the device."""
    stamps: Sequence[torch.Tensor]
    """By lane, the moments that its decode rounds' kernels leave (see `sglang_afd.kernels.stamps`);
    empty: they leave none."""

    def load(self) -> None:
        """Exchange a row on every path, so that kernels are loaded and the peers known to answer.

        A collective call of all world ranks.
        """

    def dispatch(
        self, rows: RoutedRows, round_: Round, own_sent: Callable[[], None] = nothing
    ) -> Any:
        """A: send rows to the F ranks that own their experts; return a handle for `combine`.

        Args:
            own_sent: called when the rank's own rows are sent; those of ranks that it stands for
                come after, as work that no real rank has.
        """

    def combine(self, handle: Any) -> torch.Tensor:
        """A: return [n, H], each row the weighted sum of its experts' outputs."""

    def receive(self, round_: Round) -> tuple[RowBatch | MaskedBatch, Any]:
        """F: take the rows that the A ranks send in this round; and a handle for `reply`."""

    def reply(self, output: torch.Tensor, handle: Any) -> None:
        """F: send back the experts' output.

        Args:
            output: of a `RowBatch` [R, K, H], a row for every place (places without an expert are
                not looked at); of a `MaskedBatch` shaped like its `hidden`.
        """

    def samples(self) -> Iterable[RowBatch | MaskedBatch]:
        """F: made-up batches of the forms that `receive` returns, to load the experts' kernels."""

    def failure(self, error: Exception) -> str | None:
        """What `error`, raised on this rank, means if the exchange is behind it: peer and mend."""


class ExchangeError(RuntimeError):
    """An exchange with a peer failed or timed out; the message names both ranks and the mend."""
