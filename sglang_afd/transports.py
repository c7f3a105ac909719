"""The transports by name: what a deployment's transport holds, and how a rank joins it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_afd.config import AfdConfig
from sglang_afd.dispatch.buffers import ESTIMATES, Buffers, Held, Rows
from sglang_afd.families import MoeFacts
from sglang_afd.topology import Mode

if TYPE_CHECKING:
    import torch

    from sglang_afd.context import RankContext
    from sglang_afd.dispatch.transport import Transport


def estimate(config: AfdConfig, facts: MoeFacts, *, itemsize: int, fp8: bool) -> Buffers:
    """Bytes that the configuration's transport takes on a rank of each role, for all its lanes.

    Args:
        itemsize: bytes of one element of the model's rows.
        fp8: the experts are FP8.
    """
    if config.mode is Mode.CAD:  # on CPUs alone: nothing is kept, and memory is not sized by it
        return Buffers(Held(0, 0), Held(0, 0))
    rows = Rows(
        num_experts=facts.num_experts + config.expert_replicas,
        hidden_size=facts.hidden_size,
        top_k=facts.top_k,
        itemsize=itemsize,
        fp8=fp8,
        decode=config.max_tokens_per_rank,
        block=config.prefill_block,
        lanes=config.lanes,
        emulated=len(config.emulation.emulated_by(0)),
    )
    return ESTIMATES[config.transport](config.topology, rows)


def join(context: RankContext, *, dtype: torch.dtype, fp8: bool, group: Any) -> Transport:
    """Join the exchange of `context`'s world: a collective call of all ranks.

    Args:
        dtype: of the model's rows.
        fp8: the experts are FP8.
        group: the world's process group of the ranks' device.
    """
    return _JOIN[context.config.transport](context, dtype, fp8, group)


def _gloo(context: RankContext, dtype: torch.dtype, fp8: bool, group: Any) -> Transport:
    from sglang_afd.dispatch.gloo import GlooTransport
    from sglang_afd.dispatch.step_plan import Caps

    config = context.config
    return GlooTransport(
        **_common(context),
        emulation=config.emulation,
        dtype=dtype,
        caps=Caps(config.max_tokens_per_rank, config.prefill_block),
        timeout=config.exchange_timeout,
    )


def _deepep(context: RankContext, dtype: torch.dtype, fp8: bool, group: Any) -> Transport:
    from sglang_afd.dispatch.deepep import DeepEpTransport

    cap = context.config.max_tokens_per_rank
    return DeepEpTransport(**_common(context), cap=cap, fp8=fp8, group=group)


def _nvlink(context: RankContext, dtype: torch.dtype, fp8: bool, group: Any) -> Transport:
    from sglang_afd.dispatch.arena import symmetric_arena
    from sglang_afd.dispatch.nvlink import NvlinkTransport
    from sglang_afd.dispatch.step_plan import Caps

    config = context.config
    return NvlinkTransport(
        **_common(context),
        emulation=config.emulation,
        dtype=dtype,
        caps=Caps(config.max_tokens_per_rank, config.prefill_block),
        timeout=config.exchange_timeout,
        make_arena=lambda size: symmetric_arena(size, group),
        lanes=config.lanes,
        layers=len(context.facts.layers),
    )


def _common(context: RankContext) -> dict[str, Any]:
    facts = context.facts
    return {
        "topology": context.topology,
        "rank": context.rank,
        "num_experts": context.slots,
        "hidden_size": facts.hidden_size,
        "top_k": facts.top_k,
    }


_JOIN: dict[str, Callable[[RankContext, torch.dtype, bool, Any], Transport]] = {
    "gloo": _gloo,
    "deepep": _deepep,
    "nvlink": _nvlink,
}
