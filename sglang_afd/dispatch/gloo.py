"""The `gloo` transport: point-to-point messages between CPU tensors, on any host.

It is the reference: a token's row goes once to every F rank that owns one of its experts, that F
rank reduces its experts' outputs with the router's weights, and A sums the F ranks' rows in rank
order, so equal inputs give equal bits.  Rows of other devices are staged through the CPU.

Per round and (A, F) pair with rows: A sends the routing of all its rows ([n, 2K] int32: local ids,
then the weights' bits), then only the rows with an expert there; F answers one row for each.  In
decode rounds the rows of each emulated source follow in the same way, from the rank that stands for
it; what comes back for them is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import torch

from sglang_afd.dispatch.draws import draw
from sglang_afd.dispatch.messages import Messages, Sending
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import RoutedRows, RowBatch, nothing
from sglang_afd.emulation import Emulation
from sglang_afd.kernels.exchange_reference import drawn_ids, local_ids, reduce_places
from sglang_afd.topology import Topology

_BACK = "returning rows to"


class _Sent(NamedTuple):
    """What `combine` needs: which rows went to which F rank, and the rows' form."""

    picks: list[dict[int, torch.Tensor]]
    """Of this rank, then of the sources that it stands for: F world rank -> [m] indices of the rows
    sent there."""
    like: torch.Tensor
    """[n, H], gives shape, dtype and device of the result."""


class _Received(NamedTuple):
    """What `reply` needs: how many of the batch's rows belong to which A rank, and the routing."""

    sources: list[tuple[int, int]]  # (A world rank, rows), in batch order
    expert_ids: torch.Tensor  # [R, K]
    weights: torch.Tensor  # [R, K]


class GlooTransport:
    """One rank's end of the gloo exchange."""

    graphs = False
    stamps: Sequence[torch.Tensor] = ()

    def __init__(
        self,
        *,
        topology: Topology,
        rank: int,
        num_experts: int,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype,
        caps: Caps,
        timeout: float,
        emulation: Emulation | None = None,
        both_sides: Messages | None = None,
    ) -> None:
        """Join the exchange group: a collective call of all world ranks.

        Args:
            caps: rows in one round; any number can travel, more take more memory at a time.
            timeout: seconds an operation waits for a peer.
            emulation: None: nothing is emulated.
            both_sides: sources and owners of experts are the same ranks (CAD's model ranks), and
                these are their messages; what a rank sends is then waited for in `settle`, for its
                peers take it only once they have sent theirs.
        """
        self._emulation = emulation = emulation or Emulation.none(topology)
        self.caps = caps
        self._topology = topology
        self._per_rank = emulation.whole.experts_per_rank(num_experts)
        self._hidden_size, self._top_k, self._dtype = hidden_size, top_k, dtype
        self._draws: Iterator[torch.Tensor] | None = None
        if topology.leads(rank) and emulation.emulated_by(rank):
            draws = draw(emulation, rank, cap=caps.decode, num_experts=num_experts, top_k=top_k)
            self._draws = cycle(draws)
        self._later: list[tuple[Sending, str]] | None = None if both_sides is None else []
        self._messages = both_sides or Messages(topology, rank, timeout)

    def load(self) -> None:
        """See `Transport.load`: joining the group has connected the peers."""

    def dispatch(
        self, rows: RoutedRows, round_: Round, own_sent: Callable[[], None] = nothing
    ) -> _Sent:
        """See `Transport.dispatch`; all rows go together."""
        hidden = rows.hidden.cpu()
        ids, weights = rows.expert_ids.cpu().to(torch.int32), rows.weights.cpu().float()
        routings = [(ids, weights)]
        if self._draws is not None and round_.path is Path.DECODE:
            count = hidden.shape[0]
            drawn = drawn_ids(ids, next(self._draws))[:, :count]
            routings += [(own, torch.full_like(weights, 1 / self._top_k)) for own in drawn]
        picked: list[dict[int, torch.Tensor]] = [{} for _ in routings]
        pending = []
        if hidden.shape[0]:
            for (ids, weights), picks in zip(routings, picked, strict=True):
                for index, peer in enumerate(self._topology.ffn_world):
                    local = local_ids(ids, index, self._per_rank)
                    routing = torch.cat([local, weights.contiguous().view(torch.int32)], dim=1)
                    picks[peer] = (local >= 0).any(dim=1).nonzero().flatten()
                    pending.append(self._messages.send(routing, peer))
                    if picks[peer].numel():
                        pending.append(self._messages.send(hidden[picks[peer]], peer))
        self._finish(pending, "sending rows to")
        own_sent()
        return _Sent(picked, rows.hidden)

    def combine(self, handle: _Sent) -> torch.Tensor:
        """See `Transport.combine`."""
        total = torch.zeros(handle.like.shape, dtype=torch.float32)
        for source, picks in enumerate(handle.picks):
            for peer, rows in picks.items():
                if rows.numel():
                    part = torch.empty(rows.numel(), self._hidden_size, dtype=self._dtype)
                    self._messages.receive(part, peer)
                    if source == 0:
                        total.index_add_(0, rows, part.float())
        return total.to(dtype=handle.like.dtype, device=handle.like.device)

    def receive(self, round_: Round) -> tuple[RowBatch, _Received]:
        """See `Transport.receive`."""
        hidden, ids, weights, sources = [], [], [], []
        decode = round_.path is Path.DECODE
        for source in self._emulation.served.leading_world:
            peer = self._emulation.host_of(source)
            count = round_.counts[peer] if decode or source == peer else 0
            if not count:
                continue
            routing = torch.empty(count, 2 * self._top_k, dtype=torch.int32)
            self._messages.receive(routing, peer)
            here = (routing[:, : self._top_k] >= 0).any(dim=1)
            routing = routing[here]
            block = torch.empty(routing.shape[0], self._hidden_size, dtype=self._dtype)
            if routing.shape[0]:
                self._messages.receive(block, peer)
            hidden.append(block)
            ids.append(routing[:, : self._top_k])
            weights.append(routing[:, self._top_k :].contiguous().view(torch.float32))
            sources.append((peer, routing.shape[0]))
        if not sources:
            empty = torch.empty(0, self._top_k, dtype=torch.int32)
            rows = torch.empty(0, self._hidden_size, dtype=self._dtype)
            return RowBatch(rows, empty, empty.float()), _Received([], empty, empty.float())
        batch = RowBatch(torch.cat(hidden), torch.cat(ids), torch.cat(weights))
        return batch, _Received(sources, batch.expert_ids, batch.weights)

    def reply(self, output: torch.Tensor, handle: _Received) -> None:
        """See `Transport.reply`."""
        ids, weights = handle.expert_ids.to(output.device), handle.weights.to(output.device)
        rows = reduce_places(output, ids, weights).cpu().to(self._dtype)
        blocks = rows.split([count for _, count in handle.sources])
        pending = [
            self._messages.send(block.contiguous(), peer, _BACK)
            for (peer, count), block in zip(handle.sources, blocks, strict=True)
            if count
        ]
        self._finish(pending, _BACK)

    def settle(self) -> None:
        """Wait until all that this rank has sent has left, if it is on both sides."""
        for sending, doing in self._later or ():
            self._messages.wait(sending, doing)
        self._later = self._later and []

    def _finish(self, pending: Iterable[Sending], doing: str) -> None:
        if self._later is not None:
            self._later += [(sending, doing) for sending in pending]
            return
        for sending in pending:
            self._messages.wait(sending, doing)

    def samples(self) -> list[RowBatch]:
        """One row, of the first expert."""
        ids = torch.full((1, self._top_k), -1, dtype=torch.int32)
        ids[0, 0] = 0
        hidden = torch.zeros(1, self._hidden_size, dtype=self._dtype)
        return [RowBatch(hidden, ids, torch.ones(1, self._top_k))]

    def failure(self, error: Exception) -> str | None:
        """None: every wait names its peer itself."""
        return None
