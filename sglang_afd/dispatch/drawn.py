"""Rows of emulated ranks in the `nvlink` transport: who sends them, and who keeps the replies.

A decode channel is laid out for all sources of a `sglang_afd.emulation`.  Each has its part on the
F ranks, as if it were a rank, and a part for what comes back; the parts of those that are no ranks
lie in the arena of the rank that stands for them, behind its own.
"""

from __future__ import annotations

import torch

from sglang_afd.dispatch.channel import Arena, Sent, Shape, layouts
from sglang_afd.dispatch.draws import draw
from sglang_afd.emulation import Emulation
from sglang_afd.kernels import exchange as kernels
from sglang_afd.kernels.drawn import send_drawn

BLOCKS = 256
"""Thread blocks at most of the kernel that sends: as fast as the link, as many real ranks would."""


def arena_of_sources(emulation: Emulation, shape: Shape, arena: Arena) -> Arena:
    """`arena` as a decode channel of `emulation.served` sees it: an address for each of its ranks.

    Args:
        arena: with an address for each real rank.
    """
    served, real = emulation.served, len(emulation.real.attention_world)
    part = layouts(served, shape)[0].size
    sources = (
        arena.addresses[emulation.host_of(source)] + source // real * part
        for source in served.attention_world
    )
    return Arena(arena.local, (*sources, *arena.addresses[real:]))


class DrawnEnd:
    """Sends the rows of the sources that an A rank stands for, in a decode channel."""

    def __init__(
        self,
        emulation: Emulation,
        rank: int,
        num_experts: int,
        shape: Shape,
        arena: Arena,
        offset: int,
        lane: int,
    ) -> None:
        """Draw the routing.

        Args:
            num_experts: of the whole deployment.
            arena: see `arena_of_sources`.
            offset: where the channel begins in every arena, in bytes.
        """
        served = emulation.served
        on_ffn, device = layouts(served, shape)[1], arena.local.device
        parts = [
            (arena.addresses[peer] + offset, source)
            for peer in served.ffn_world
            for source in emulation.emulated_by(rank)
        ]
        self._to = kernels.Peers(
            *(
                torch.tensor([base + field.part(source) for base, source in parts], device=device)
                for field in (on_ffn.rows, on_ffn.flags, on_ffn.ids, on_ffn.weights)
            )
        )
        self._drawn = draw(
            emulation, rank, cap=shape.cap, num_experts=num_experts, top_k=shape.top_k, lane=lane
        ).to(device)
        self._per_rank = emulation.whole.experts_per_rank(num_experts)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def send(self, hidden: torch.Tensor, sent: Sent, exchange: torch.Tensor) -> None:
        """Send in the exchange that the rank's own end has just begun with `sent`.

        Nothing is gained by a stream beside the rank's own, which comes to its wait for the F ranks
        next: they answer when all sources have sent.

        Args:
            hidden: [n, H], the rank's own rows.
            exchange: the end's count of exchanges.
        """
        send_drawn(
            hidden.contiguous(),
            sent.expert_ids,
            self._drawn,
            to=self._to,
            exchange=exchange,
            ticket=self._ticket,
            per_rank=self._per_rank,
            blocks=BLOCKS,
        )
