"""The `nvlink` transport: own kernels that write into peers' memory, among the GPUs of one host.

A token's row goes once to each F rank that owns one of its experts; that F rank reduces its
experts' outputs and returns one row.  The decode rounds of each lane have a channel of their own
(see `sglang_afd.dispatch.channel`), and all bulk blocks share one, in one arena of CUDA symmetric
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_afd.dispatch.channel import (
    BLOCKS,
    Arena,
    AttentionEnd,
    FfnEnd,
    Sent,
    Shape,
    Span,
    Waits,
    channel_bytes,
)
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import RoutedRows, RowBatch
from sglang_afd.kernels.exchange import failure_of
from sglang_afd.topology import Role, Topology


class _Pending(NamedTuple):
    channel: int
    sent: Sent


class _Received(NamedTuple):
    channel: int
    spans: list[Span]


class NvlinkTransport:
    """One rank's end of the exchange."""

    graphs = True

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
        make_arena: Callable[[int], Arena],
        lanes: int = 1,
        blocks: int = BLOCKS,
    ) -> None:
        """Allocate the buffers: a collective call of all world ranks.

        Args:
            lanes: how many lanes' decode rounds may be under way at the same time.
            timeout: seconds that a wait on the device lasts before it ends the rank.
            make_arena: bytes -> memory that all ranks of the world can write to.
            blocks: see `channel.BLOCKS`.
        """
        assert caps.bulk is not None
        self.caps = caps
        self._topology, self._rank, self._timeout = topology, rank, timeout
        self._per_rank = topology.experts_per_rank(num_experts)
        self._bulk = lanes  # the channel after those of the lanes
        self._shapes = shapes = [
            Shape(cap, hidden_size, top_k, dtype) for cap in (*[caps.decode] * lanes, caps.bulk)
        ]
        sizes = [channel_bytes(topology, shape) for shape in shapes]
        arena = make_arena(sum(sizes))
        self._device = arena.local.device
        pinned = arena.local.is_cuda
        waits = Waits(torch.zeros(2, dtype=torch.int64, pin_memory=pinned), timeout)
        self._waits = waits
        self._attention: list[AttentionEnd] = []
        self._ffn: list[FfnEnd] = []
        offset = 0
        for shape, size in zip(shapes, sizes, strict=True):
            if topology.role_of(rank) is Role.ATTENTION:
                self._attention.append(
                    AttentionEnd(topology, rank, num_experts, shape, arena, offset, waits, blocks)
                )
            else:
                self._ffn.append(FfnEnd(topology, rank, shape, arena, offset, waits, blocks))
            offset += size

    def load(self) -> None:
        """See `Transport.load`."""
        attention = self._topology.attention_world
        counts = tuple(int(rank in attention) for rank in range(self._topology.world_size))
        for channel, shape in enumerate(self._shapes):
            path = Path.BULK if channel == self._bulk else Path.DECODE
            round_ = Round(path, 0, counts, channel)
            if self._attention:
                self.combine(self.dispatch(self._first_row(shape), round_))
            else:
                batch, received = self.receive(round_)
                places = (*batch.expert_ids.shape, shape.hidden_size)
                self.reply(batch.hidden.new_zeros(places), received)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _first_row(self, shape: Shape) -> RoutedRows:
        """A row for an expert of as many F ranks as it can have."""
        ids = torch.full((1, shape.top_k), -1, dtype=torch.int32, device=self._device)
        owners = torch.arange(min(shape.top_k, len(self._topology.ffn_world)))
        ids[0, : len(owners)] = owners.int() * self._per_rank
        return RoutedRows(
            torch.zeros(1, shape.hidden_size, dtype=shape.dtype, device=self._device),
            ids,
            torch.zeros(1, shape.top_k, device=self._device),
        )

    def dispatch(self, rows: RoutedRows, round_: Round) -> _Pending:
        """See `Transport.dispatch`."""
        # A decode round's receiver looks at all slots, so that it needs no counts.
        decode = round_.path is Path.DECODE
        slots = self.caps.decode if decode else rows.hidden.shape[0]
        channel = self._channel(round_)
        return _Pending(channel, self._attention[channel].dispatch(rows, slots=slots))

    def combine(self, handle: _Pending) -> torch.Tensor:
        """See `Transport.combine`."""
        return self._attention[handle.channel].combine(handle.sent)

    def receive(self, round_: Round) -> tuple[RowBatch, _Received]:
        """See `Transport.receive`."""
        sources = len(self._topology.attention_world)
        if round_.path is Path.DECODE:
            spans = [Span(0, sources, self.caps.decode)]
        else:
            counts = round_.counts[:sources]
            spans = [Span(source, 1, count) for source, count in enumerate(counts) if count]
        channel = self._channel(round_)
        return self._ffn[channel].receive(spans), _Received(channel, spans)

    def reply(self, output: torch.Tensor, handle: _Received) -> None:
        """See `Transport.reply`."""
        self._ffn[handle.channel].reply(output.contiguous(), handle.spans)

    def samples(self) -> list[RowBatch]:
        """A decode round, which has places for all A ranks, and bulk blocks of all magnitudes: the
        experts' kernels are chosen by the number of rows."""
        decode = self._ffn[0].sample(len(self._topology.attention_world) * self.caps.decode)
        most, bulk = self._shapes[self._bulk].cap, self._ffn[self._bulk]
        sizes = {most >> halvings for halvings in range(most.bit_length())}
        return [decode, *(bulk.sample(size) for size in sorted(sizes))]

    def _channel(self, round_: Round) -> int:
        return round_.lane if round_.path is Path.DECODE else self._bulk

    def failure(self, error: Exception) -> str | None:
        """See `Transport.failure`."""
        failed = failure_of(self._waits.failure)
        if failed is None:
            return None
        peers = self._topology.attention_world if self._ffn else self._topology.ffn_world
        return (
            f"{self._topology.name_of(self._rank)} waited {self._timeout:g} s "
            f"(--afd-exchange-timeout) for {self._topology.name_of(peers[failed.peer])} in "
            f"exchange {failed.exchange}; check that it is alive (its log names the cause) and "
            f"restart the deployment"
        )
