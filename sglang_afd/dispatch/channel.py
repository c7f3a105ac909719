"""One channel of the `nvlink` transport: a lane's or path's buffers, and the ends that use them.

Every rank has an arena of the same size that all ranks can write to; a channel takes the same
stretch of it on all ranks.  On an F rank that stretch holds, for each A rank, `cap` rows with their
local expert ids and weights; on an A rank, for each F rank, the `cap` rows that come back.  A rank
writes only into the part of a peer's stretch that is its own, and only reads its own stretch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_afd.dispatch.transport import RoutedRows, RowBatch
from sglang_afd.kernels import exchange as kernels
from sglang_afd.kernels import flags
from sglang_afd.topology import Topology

_ALIGNMENT = 256  # bytes; rows are moved 16 bytes at a time
BLOCKS = 128
"""Thread blocks at most of a kernel that writes into peers: about as many SMs, briefly."""
RETURN_BLOCKS = 512
"""The same of F's replies: rows of all A ranks, each of several loads that wait for one another."""


class Arena(NamedTuple):
    """Memory that every rank of the world can write to."""

    local: torch.Tensor
    """uint8: this rank's own, zero at first."""
    addresses: tuple[int, ...]
    """Where every world rank's arena begins in this process's address space."""


class Shape(NamedTuple):
    """What travels through a channel."""

    cap: int
    """Rows of one A rank in one exchange."""
    hidden_size: int
    top_k: int
    dtype: torch.dtype


class _Field(NamedTuple):
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next field may begin."""
        return self.offset + -(-self.size // _ALIGNMENT) * _ALIGNMENT

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The field as a tensor over a channel's stretch of an arena."""
        return memory[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)

    def part(self, index: int) -> int:
        """Offset in bytes of the part that belongs to the peer with that index."""
        return self.offset + index * math.prod(self.shape[1:]) * self.dtype.itemsize


class Layout(NamedTuple):
    """Fields of a channel on one rank, in bytes from the channel's beginning; indexed by peer."""

    rows: _Field
    flags: _Field
    ids: _Field
    weights: _Field
    size: int

    @classmethod
    def of(cls, peers: int, shape: Shape, *, with_routing: bool) -> Layout:
        """The layout where rows of `peers` ranks arrive."""
        routing = (peers, shape.cap if with_routing else 0, shape.top_k)
        rows = _Field(0, (peers, shape.cap, shape.hidden_size), shape.dtype)
        flags = _Field(rows.end, (peers,), torch.int64)
        ids = _Field(flags.end, routing, torch.int32)
        weights = _Field(ids.end, routing, torch.float32)
        return cls(rows, flags, ids, weights, weights.end)


def layouts(topology: Topology, shape: Shape) -> tuple[Layout, Layout]:
    """Where rows arrive on an A rank, and on an F rank."""
    return (
        Layout.of(len(topology.ffn_world), shape, with_routing=False),
        Layout.of(len(topology.attention_world), shape, with_routing=True),
    )


def channel_bytes(topology: Topology, shape: Shape, hosted: int = 1) -> int:
    """Bytes of a channel's stretch of every arena.

    Args:
        hosted: how many A ranks' parts lie in one arena: more than one, if a rank stands for others
            (see `sglang_afd.dispatch.drawn`).
    """
    on_attention, on_ffn = layouts(topology, shape)
    return max(hosted * on_attention.size, on_ffn.size)


class Waits(NamedTuple):
    """What bounds the waits of all channels of a rank."""

    failure: torch.Tensor
    """[2] int64, readable by the host at any time: see `kernels.exchange.failure_of`."""
    seconds: float


class Sent(NamedTuple):
    """What `AttentionEnd.combine` needs of the exchange that `dispatch` began."""

    expert_ids: torch.Tensor  # [n, K] int32, contiguous


class AttentionEnd:
    """The A side of a channel."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        num_experts: int,
        shape: Shape,
        arena: Arena,
        offset: int,
        waits: Waits,
        blocks: int = BLOCKS,
        stamps: torch.Tensor | None = None,
    ) -> None:
        """`offset`: where the channel begins in every arena, in bytes; `stamps`: its own, if its
        kernels are to leave moments (see `sglang_afd.kernels.stamps`)."""
        here, there = layouts(topology, shape)
        device = arena.local.device
        self._stamps = stamps
        memory = arena.local[offset : offset + here.size]
        self._shape, self._waits, self._blocks = shape, waits, blocks
        self._per_rank = topology.experts_per_rank(num_experts)
        self._replies = here.rows.of(memory).flatten(0, 1)
        self._flags = here.flags.of(memory)
        index = topology.attention_world.index(rank)
        bases = [arena.addresses[peer] + offset for peer in topology.ffn_world]
        self._to = kernels.Peers(
            *(
                torch.tensor([base + field.part(index) for base in bases], device=device)
                for field in (there.rows, there.flags, there.ids, there.weights)
            )
        )
        self.exchange = torch.zeros(1, dtype=torch.int64, device=device)
        """How many exchanges were begun."""
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def dispatch(self, rows: RoutedRows, *, slots: int) -> Sent:
        """Send up to `cap` rows; `slots`: see `kernels.exchange.send_rows`.

        Raises:
            ValueError: rows, slots or hidden size do not fit the channel: they would be written
                into what belongs to other ranks.
        """
        count, size = rows.hidden.shape
        if not (count <= slots <= self._shape.cap and size == self._shape.hidden_size):
            raise ValueError(
                f"{count} rows of {size} elements in {slots} slots do not fit a channel of "
                f"{self._shape.cap} rows of {self._shape.hidden_size}"
            )
        # One type, so that the kernels that `load` has loaded are the ones that run.
        expert_ids = rows.expert_ids.to(torch.int32).contiguous()
        kernels.send_rows(
            rows.hidden.contiguous(),
            expert_ids,
            rows.weights.float().contiguous(),
            to=self._to,
            exchange=self.exchange,
            ticket=self._ticket,
            slots=slots,
            per_rank=self._per_rank,
            blocks=self._blocks,
            stamps=self._stamps,
        )
        return Sent(expert_ids)

    def combine(self, sent: Sent) -> torch.Tensor:
        """Wait for every F rank and add up their rows: [n, H]."""
        flags.wait(
            self._flags,
            self.exchange,
            first=0,
            count=self._flags.shape[0],
            failure=self._waits.failure,
            seconds=self._waits.seconds,
            counts_here=False,
        )
        out = self._replies.new_empty(sent.expert_ids.shape[0], self._shape.hidden_size)
        kernels.sum_replies(
            self._replies,
            sent.expert_ids,
            cap=self._shape.cap,
            per_rank=self._per_rank,
            out=out,
            exchange=self.exchange,
            stamps=self._stamps,
        )
        return out


class Span(NamedTuple):
    """Consecutive A world ranks in one exchange, each with `rows_each` rows."""

    first: int
    sources: int
    rows_each: int


class FfnEnd:
    """The F side of a channel."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        shape: Shape,
        arena: Arena,
        offset: int,
        waits: Waits,
        blocks: int = RETURN_BLOCKS,
        stamps: torch.Tensor | None = None,
    ) -> None:
        """As `AttentionEnd`."""
        there, here = layouts(topology, shape)
        device = arena.local.device
        self._stamps = stamps
        memory = arena.local[offset : offset + here.size]
        self._shape, self._waits, self._blocks = shape, waits, blocks
        self._rows = here.rows.of(memory).flatten(0, 1)
        self._ids = here.ids.of(memory).flatten(0, 1)
        self._weights = here.weights.of(memory).flatten(0, 1)
        self._flags = here.flags.of(memory)
        index = topology.ffn_world.index(rank)
        bases = [arena.addresses[peer] + offset for peer in topology.attention_world]
        self._to = kernels.Peers(
            *(
                torch.tensor([base + field.part(index) for base in bases], device=device)
                for field in (there.rows, there.flags)
            )
        )
        self._exchanges = torch.zeros(len(bases), dtype=torch.int64, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def receive(self, spans: Sequence[Span]) -> RowBatch:
        """Wait for the spans' sources; return their rows span by span.

        In place where one span takes all `cap` rows of its sources, or has one source.
        """
        for span in spans:
            flags.wait(
                self._flags,
                self._exchanges,
                first=span.first,
                count=span.sources,
                failure=self._waits.failure,
                seconds=self._waits.seconds,
                counts_here=True,
                stamps=self._stamps,
            )
        return RowBatch(
            *(
                self._taken(field, spans[0])
                if len(spans) == 1
                else torch.cat([self._taken(field, span) for span in spans])
                for field in (self._rows, self._ids, self._weights)
            )
        )

    def sample(self, count: int) -> RowBatch:
        """A made-up batch of that many rows, of which one has an expert."""
        rows = slice(0, count)
        ids = torch.full_like(self._ids[rows], -1)
        ids[0, 0] = 0
        return RowBatch(self._rows[rows], ids, self._weights[rows])

    def _taken(self, field: torch.Tensor, span: Span) -> torch.Tensor:
        """A copy where sources leave places empty between their rows, else a view."""
        sources = field.unflatten(0, (-1, self._shape.cap))
        return sources[span.first : span.first + span.sources, : span.rows_each].flatten(0, 1)

    def reply(self, outputs: torch.Tensor, spans: Sequence[Span]) -> None:
        """Reduce [R, K, H] outputs, span by span, and send the rows to the spans' sources."""
        start = 0
        for span in spans:
            stop = start + span.sources * span.rows_each
            kernels.return_rows(
                outputs[start:stop],
                self._ids,
                self._weights,
                to=self._to,
                exchanges=self._exchanges,
                ticket=self._ticket,
                first=span.first,
                count=span.sources,
                rows_each=span.rows_each,
                cap=self._shape.cap,
                blocks=self._blocks,
                stamps=self._stamps,
            )
            start = stop
