"""Makes the transport that the configuration names, and says what it will hold."""

from __future__ import annotations

from typing import Any

import torch

from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.dispatch.transport import Buffers, Transport
from sglang_afd.families import MoeFacts


def make_transport(context: RankContext, *, dtype: torch.dtype, fp8: bool, group: Any) -> Transport:
    """Join the exchange of `context`'s world: a collective call of all ranks.

    Args:
        dtype: of the model's rows.
        fp8: the experts are FP8, so rows may travel as FP8.
        group: the world's process group of the ranks' device.
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
    from sglang_afd.dispatch.deepep import DeepEpTransport

    return DeepEpTransport(
        topology=context.topology,
        rank=context.rank,
        num_experts=facts.num_experts,
        hidden_size=facts.hidden_size,
        top_k=facts.top_k,
        cap=config.max_tokens_per_rank,
        fp8=fp8,
        group=group,
    )


def buffer_bytes(config: AfdConfig, facts: MoeFacts, *, dtype: torch.dtype, fp8: bool) -> Buffers:
    """Bytes that the configuration's transport holds on a rank of each role, per lane."""
    if config.transport == "gloo":
        from sglang_afd.dispatch.gloo import gloo_buffers

        return gloo_buffers(
            cap=config.max_tokens_per_rank,
            hidden_size=facts.hidden_size,
            top_k=facts.top_k,
            dtype=dtype,
        )
    from sglang_afd.dispatch.deepep import deepep_buffers

    return deepep_buffers(
        topology=config.topology,
        num_experts=facts.num_experts,
        hidden_size=facts.hidden_size,
        cap=config.max_tokens_per_rank,
        fp8=fp8,
    )
