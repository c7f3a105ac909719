"""The stages of a step that a CUDA graph replays, from moments that its kernels have left.

`sglang_afd.kernels.stamps` says what is left where; a lane's decode channel has stamps of its own.
"""

from __future__ import annotations

import torch

from sglang_afd.kernels import stamps as kernels
from sglang_afd.observe.stages import Spent, Stage
from sglang_afd.topology import Role

_PARTS = {
    # by role: each stage of an exchange, where it begins and where it ends
    Role.ATTENTION: (
        (Stage.DISPATCH, kernels.SEND, kernels.SENT),
        (Stage.COMBINE, kernels.SENT, kernels.SUMMED),
    ),
    Role.FFN: (
        (Stage.RECEIVE, kernels.WAIT, kernels.CAME),
        (Stage.REPLY, kernels.RETURN, kernels.RETURNED),
    ),
}
_NANOSECOND = 1e-9
_COPIES = 16
"""Steps whose moments may be on their way to the host; those beyond tell no stages."""


class GraphStamps:
    """One lane's stamps on one rank; see `sglang_afd.observe.stages.Stamps`."""

    def __init__(self, stamps: torch.Tensor, role: Role, layers: int) -> None:
        """`layers`: MoE layers, each one exchange of a replayed step."""
        self._stamps, self._parts, self._layers = stamps, _PARTS[role], layers
        self._switch = torch.tensor([0, 1], pin_memory=stamps.is_cuda)
        # Now, for to allocate pinned memory may wait for the device, and that for a peer.
        self._copies = [
            torch.empty(stamps.shape, dtype=torch.int64, pin_memory=stamps.is_cuda)
            for _ in range(_COPIES)
        ]

    def arm(self, on: bool) -> None:
        """See `Stamps.arm`; no kernel that a waiting stream could keep from being loaded."""
        place = self._stamps[0, kernels.ARMED : kernels.ARMED + 1]
        place.copy_(self._switch[int(on) : int(on) + 1], non_blocking=True)

    def begin(self) -> None:
        """See `Stamps.begin`."""
        kernels.anchor(self._stamps)

    def take(self) -> torch.Tensor | None:
        """See `Stamps.take`."""
        return self._copies.pop().copy_(self._stamps, non_blocking=True) if self._copies else None

    def spent(self, taken: torch.Tensor | None) -> list[Spent]:
        """See `Stamps.spent`; `taken` is used again."""
        if taken is None:
            return []
        self._copies.append(taken)
        rows = taken[1:]
        rows = rows[rows[:, kernels.NUMBER].argsort()][-self._layers :]
        numbers = rows[:, kernels.NUMBER]
        anchor = taken[0, kernels.ANCHOR]
        places = sorted({place for _, *ends in self._parts for place in ends})
        moments = rows[:, places].flatten()
        in_order = bool((moments.diff() >= 0).all()) and bool(moments[0] >= anchor)
        whole = bool(numbers[0] > 0) and bool((numbers.diff() == 1).all())
        if not whole or not in_order:
            return []  # some exchanges passed before the stamps were armed
        since = ((rows - anchor) * _NANOSECOND).tolist()
        return [
            (stage, row[first], row[last]) for row in since for stage, first, last in self._parts
        ]
