"""The `nvlink` transport: own kernels that write into peers' memory, among the GPUs of one host.

A token's row goes once to each F rank that owns one of its experts; that F rank reduces its
experts' outputs and returns one row.  The decode rounds of each lane have a channel of their own
(see `sglang_afd.dispatch.channel`), and all bulk blocks share one, in one arena of CUDA symmetric
memory.  Emulated ranks (`sglang_afd.dispatch.drawn`) take part in decode channels alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sglang_afd.dispatch.channel import (
    BLOCKS,
    RETURN_BLOCKS,
    Arena,
    AttentionEnd,
    FfnEnd,
    Sent,
    Shape,
    Span,
    Waits,
    channel_bytes,
)
from sglang_afd.dispatch.drawn import DrawnEnd, arena_of_sources
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import RoutedRows, RowBatch, nothing
from sglang_afd.emulation import Emulation
from sglang_afd.kernels.flags import failure_of
from sglang_afd.kernels.stamps import anchor, new_stamps
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
        blocks: int | None = None,
        emulation: Emulation | None = None,
        layers: int = 0,
    ) -> None:
        """Allocate the buffers: a collective call of all world ranks.

        Args:
            lanes: how many lanes' decode rounds may be under way at the same time.
            timeout: seconds that a wait on the device lasts before it ends the rank.
            make_arena: bytes -> memory that all ranks of the world can write to.
            blocks: see `channel.BLOCKS` and `channel.RETURN_BLOCKS`; None: these.
            emulation: None: nothing is emulated.
            layers: of the model, whose exchanges leave moments; 0: none does.
        """
        assert caps.bulk is not None
        self.caps = caps
        self._topology, self._rank, self._timeout = topology, rank, timeout
        self._emulation = emulation = emulation or Emulation.none(topology)
        self._per_rank = emulation.whole.experts_per_rank(num_experts)
        present = emulation.present_experts(num_experts)
        self._bulk = lanes  # the channel after those of the lanes
        self._shapes = shapes = [
            Shape(cap, hidden_size, top_k, dtype) for cap in (*[caps.decode] * lanes, caps.bulk)
        ]
        served = emulation.served
        hosted = 1 + len(emulation.emulated_by(0))
        sizes = [*[channel_bytes(served, shapes[0], hosted)] * lanes]
        sizes.append(channel_bytes(topology, shapes[self._bulk]))
        arena = make_arena(sum(sizes))
        self._device = arena.local.device
        pinned = arena.local.is_cuda
        waits = Waits(torch.zeros(2, dtype=torch.int64, pin_memory=pinned), timeout)
        self._waits = waits
        self._attention: list[AttentionEnd] = []
        self._drawn: list[DrawnEnd] = []
        self._ffn: list[FfnEnd] = []
        sources = arena_of_sources(emulation, shapes[0], arena)
        on_attention = BLOCKS if blocks is None else blocks
        on_ffn = RETURN_BLOCKS if blocks is None else blocks
        self.stamps: Sequence[torch.Tensor] = [
            new_stamps(layers, self._device) for _ in range(lanes if layers else 0)
        ]
        offset = 0
        for channel, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            bulk = channel == self._bulk
            world, memory = (topology, arena) if bulk else (served, sources)
            stamps = None if bulk or not layers else self.stamps[channel]
            if topology.role_of(rank) is Role.ATTENTION:
                self._attention.append(
                    AttentionEnd(
                        world, rank, present, shape, memory, offset, waits, on_attention, stamps
                    )
                )
                if emulation.emulated_by(rank) and not bulk:
                    self._drawn.append(
                        DrawnEnd(emulation, rank, num_experts, shape, memory, offset, channel)
                    )
            else:
                place = world.ffn_world[topology.ffn_world.index(rank)]
                self._ffn.append(FfnEnd(world, place, shape, memory, offset, waits, on_ffn, stamps))
            offset += size

    def load(self) -> None:
        """See `Transport.load`."""
        for stamps in self.stamps:
            anchor(stamps)
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

    def dispatch(
        self, rows: RoutedRows, round_: Round, own_sent: Callable[[], None] = nothing
    ) -> _Pending:
        """See `Transport.dispatch`."""
        # A decode round's receiver looks at all slots, so that it needs no counts.
        decode = round_.path is Path.DECODE
        slots = self.caps.decode if decode else rows.hidden.shape[0]
        channel = self._channel(round_)
        end = self._attention[channel]
        sent = end.dispatch(rows, slots=slots)
        own_sent()
        if decode and self._drawn:
            self._drawn[channel].send(rows.hidden, sent, end.exchange)
        return _Pending(channel, sent)

    def combine(self, handle: _Pending) -> torch.Tensor:
        """See `Transport.combine`."""
        return self._attention[handle.channel].combine(handle.sent)

    def receive(self, round_: Round) -> tuple[RowBatch, _Received]:
        """See `Transport.receive`."""
        if round_.path is Path.DECODE:
            spans = [Span(0, self._sources, self.caps.decode)]
        else:
            counts = round_.counts[: len(self._topology.attention_world)]
            spans = [Span(source, 1, count) for source, count in enumerate(counts) if count]
        channel = self._channel(round_)
        return self._ffn[channel].receive(spans), _Received(channel, spans)

    def reply(self, output: torch.Tensor, handle: _Received) -> None:
        """See `Transport.reply`."""
        self._ffn[handle.channel].reply(output.contiguous(), handle.spans)

    def samples(self) -> list[RowBatch]:
        """A decode round, which has places for all sources, and bulk blocks of all magnitudes: the
        experts' kernels are chosen by the number of rows."""
        decode = self._ffn[0].sample(self._sources * self.caps.decode)
        most, bulk = self._shapes[self._bulk].cap, self._ffn[self._bulk]
        sizes = {most >> halvings for halvings in range(most.bit_length())}
        return [decode, *(bulk.sample(size) for size in sorted(sizes))]

    @property
    def _sources(self) -> int:
        return len(self._emulation.served.attention_world)

    def _channel(self, round_: Round) -> int:
        return round_.lane if round_.path is Path.DECODE else self._bulk

    def failure(self, error: Exception) -> str | None:
        """See `Transport.failure`."""
        failed = failure_of(self._waits.failure)
        if failed is None:
            return None
        if self._ffn:
            peer = self._emulation.name_of(failed.peer)
        else:
            peer = self._topology.name_of(self._topology.ffn_world[failed.peer])
        return (
            f"{self._topology.name_of(self._rank)} waited {self._timeout:g} s "
            f"(--afd-exchange-timeout) for {peer} in "
            f"exchange {failed.exchange}; check that it is alive (its log names the cause) and "
            f"restart the deployment"
        )
