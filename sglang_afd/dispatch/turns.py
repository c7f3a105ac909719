"""Lanes take turns in working on their rank's GPU; see `sglang_afd.kernels.turns`."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from sglang_afd.config import ConfigError
from sglang_afd.kernels.turns import end_turn, take_turn
from sglang_afd.topology import Role

ENV = "SGLANG_AFD_LANE_TURNS"
"""For measurements: the role whose ranks' lanes alone take turns, or `none`; else all do.  Lanes
without turns share the GPU as their kernels come (docs/kernels.md says what that costs)."""


class Turns(Protocol):
    """What lanes have in common on one rank; both are recorded in the lanes' graphs."""

    def take(self) -> None:
        """From here on the stream's work runs without other lanes' beside it."""

    def end(self) -> None:
        """The next lane's turn may begin."""


class NoTurns:
    """One lane has nobody to take turns with."""

    def take(self) -> None:
        """See `Turns`."""

    def end(self) -> None:
        """See `Turns`."""


class DeviceTurns:
    """Turns that a device keeps by itself."""

    def __init__(self, device: torch.device | str, seconds: float) -> None:
        """`seconds`: how long a turn may have to be waited for."""
        self._turns = torch.zeros(2, dtype=torch.int64, device=device)
        self._seconds = seconds

    def take(self) -> None:
        """See `Turns`."""
        take_turn(self._turns, seconds=self._seconds)

    def end(self) -> None:
        """See `Turns`."""
        end_turn(self._turns)

    def load(self) -> None:
        """Load the kernels, before a lane waits while another is recorded or replayed."""
        self.take()
        self.end()
        torch.cuda.synchronize()


def turns_of(role: Role, lanes: int, device: torch.device | str, seconds: float) -> Turns:
    """The turns of a rank with so many lanes on a GPU.

    Raises:
        ConfigError: the environment asks for turns that there are not.
    """
    wanted, known = os.environ.get(ENV, "all"), ("all", "none", *(each.value for each in Role))
    if wanted not in known:
        raise ConfigError(f"{ENV} is {wanted!r}; use one of {', '.join(known)}")
    if lanes == 1 or wanted not in ("all", role.value):
        return NoTurns()
    turns = DeviceTurns(device, seconds)
    turns.load()
    return turns
