"""Makes the transport that the configuration names."""

from __future__ import annotations

import torch

from sglang_afd.context import RankContext
from sglang_afd.dispatch.transport import Transport


def make_transport(context: RankContext, *, dtype: torch.dtype, device: str) -> Transport:
    """Join the exchange of `context`'s world: a collective call of all ranks.

    Args:
        dtype: of the rows that travel.
        device: type of the device the rows live on.
    """
    facts, config = context.facts, context.config
    if config.transport == "gloo":
        from sglang_afd.dispatch.gloo import GlooTransport

        return GlooTransport(
            topology=context.topology,
            rank=context.rank,
            num_experts=facts.num_experts,
            hidden_size=facts.hidden_size,
            top_k=facts.top_k,
            dtype=dtype,
            timeout=config.exchange_timeout,
        )
    raise ValueError(f"no transport {config.transport}")
