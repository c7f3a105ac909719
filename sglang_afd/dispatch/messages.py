"""Point-to-point messages between the CPU tensors of a world's ranks, over gloo.

Every wait is bounded, and an error names both ranks.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from sglang_afd.dispatch.transport import ExchangeError
from sglang_afd.topology import Topology

_RETRY_HINT = "check that the peer is alive (its log names the cause) and restart the deployment"


class Sending(NamedTuple):
    """A message under way."""

    data: torch.Tensor
    """What is sent: it must live until the message has left."""
    work: dist.Work | None
    """None: it has arrived, at this rank itself."""
    peer: int


class Messages:
    """One rank's end of the messages of a world."""

    def __init__(self, topology: Topology, rank: int, timeout: float) -> None:
        """Join the world's group: a collective call of all world ranks, which connects them.

        Args:
            timeout: seconds an operation waits for a peer.
        """
        self._topology, self._rank, self._timeout = topology, rank, timeout
        self._own: deque[torch.Tensor] = deque()
        self._group = dist.new_group(
            list(range(topology.world_size)), backend="gloo", timeout=timedelta(seconds=timeout)
        )

    def send(self, tensor: torch.Tensor, peer: int, doing: str = "sending rows to") -> Sending:
        """Begin to send `tensor` to world rank `peer`, maybe this one; `doing` is for errors.

        Raises:
            ExchangeError: the peer is lost.
        """
        data = _as_bytes(tensor)
        if peer == self._rank:
            self._own.append(data)
            return Sending(data, None, peer)
        try:
            return Sending(data, dist.isend(data, peer, group=self._group), peer)
        except RuntimeError as error:
            raise self._failure(doing, peer, error) from error

    def receive(self, into: torch.Tensor, peer: int, doing: str = "waiting for rows of") -> None:
        """Wait for a message of world rank `peer`, of the size and type of `into`.

        Raises:
            ExchangeError: the peer is lost, or late.
        """
        if peer == self._rank:
            _as_bytes(into).copy_(self._own.popleft())
            return
        try:
            dist.recv(_as_bytes(into), peer, group=self._group)
        except RuntimeError as error:
            raise self._failure(doing, peer, error) from error

    def wait(self, sending: Sending, doing: str = "sending rows to") -> None:
        """Wait until a message has left.

        Raises:
            ExchangeError: the peer is lost, or late.
        """
        if sending.work is None:
            return
        try:
            sending.work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise self._failure(doing, sending.peer, error) from error

    def _failure(self, doing: str, peer: int, error: RuntimeError) -> ExchangeError:
        return ExchangeError(
            f"{self._topology.name_of(self._rank)} failed {doing} "
            f"{self._topology.name_of(peer)} within {self._timeout:g} s "
            f"(--afd-exchange-timeout): {error}; {_RETRY_HINT}"
        )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor that any gloo build can send, whatever its dtype."""
    return tensor.contiguous().view(torch.uint8)
