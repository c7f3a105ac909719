"""The ledger: bytes between the roles, and bytes on a rank of each role."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.config import AfdConfig
from sglang_afd.dispatch.buffers import ESTIMATES, Rows
from sglang_afd.plan.errors import PlanError, real, whole
from sglang_afd.plan.profile import GpuProfile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.shape import ModelShape
from sglang_afd.topology import Topology

SCALE_BLOCK = 128
"""Elements of an FP8 row that share one float32 scale."""


@dataclass(frozen=True)
class Travel:
    """Bytes that cross between the roles in one MoE layer, for one token."""

    out: float
    """Attention to FFN: the row's copies, with scales and routing."""
    back: float
    """FFN to attention."""


def activation_bytes(tokens: int, hidden: int, layers: int, itemsize: int) -> int:
    """Bytes of the rows of a step, both ways, one copy a token."""
    for field, value in (("tokens", tokens), ("layers", layers)):
        whole(field, value, least=0)
    whole("hidden", hidden)
    whole("itemsize", itemsize, most=8)
    return 2 * tokens * hidden * layers * itemsize


def routing_bytes(
    tokens: int, top_k: int, layers: int, itemsize: int, *, router_on_attention: bool = True
) -> int:
    """Bytes of expert ids (int32) and weights (`itemsize`); none when FFN ranks route."""
    for field, value in (("tokens", tokens), ("top_k", top_k), ("layers", layers)):
        whole(field, value, least=0)
    whole("itemsize", itemsize, most=8)
    return tokens * top_k * (4 + itemsize) * layers if router_on_attention else 0


def row_bytes(hidden: int, itemsize: int, *, fp8: bool) -> int:
    """A row on the wire: `itemsize` an element, or FP8 with its scales."""
    return hidden + 4 * -(-hidden // SCALE_BLOCK) if fp8 else hidden * itemsize


FUSED = "fused"
"""An expert kernel that takes rows and returns them itself, as FastAFD's; not in this package."""
TRANSPORTS = ("nvlink", "deepep", FUSED)
"""Those whose time the planner knows: gloo, the reference, goes through host memory."""
TRAVELS = (*TRANSPORTS, "gloo")


def travel(shape: ModelShape, transport: str, routing: Routing, owners: int) -> Travel:
    """What a token costs on `transport` with `owners` FFN ranks.

    ``nvlink`` and ``fused`` send a copy to each FFN rank that a token's experts are on, and get a
    reduced row from each; ``deepep`` a copy for each of its experts, both ways; ``gloo`` a copy to
    every FFN rank.  Rows of FP8 experts travel as FP8 on deepep and fused.
    """
    if transport not in TRAVELS:
        raise PlanError("--transport", f"{transport} is not one of {', '.join(TRAVELS)}")
    fp8 = shape.fp8 and transport in ("deepep", FUSED)
    out = row_bytes(shape.hidden, shape.itemsize, fp8=fp8)
    back = shape.hidden * shape.itemsize
    if transport == "deepep":
        return Travel(shape.top_k * (out + 16), shape.top_k * back)
    copies = owners if transport == "gloo" else float(routing.copies(owners).sum())
    return Travel(copies * (out + 8 * shape.top_k), copies * back)


def step_travel(shape: ModelShape, cost: Travel, tokens: float) -> Travel:
    """Bytes of `tokens` in all MoE layers of a step (decode, verify or prefill alike)."""
    real("tokens", tokens)
    return Travel(*(part * tokens * shape.moe_layers for part in (cost.out, cost.back)))


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank."""

    weights: float
    buffers: float
    graphs: float
    kv: float
    """What is left for the KV cache; below 0: the rest does not fit."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.buffers + self.graphs + max(self.kv, 0.0)


_PREFILL_BLOCK = AfdConfig(attention_ranks=1, ffn_ranks=1).prefill_block
LANE_BYTES = 1.5e9
"""CUDA graphs and workspaces of a lane after the first, whose are outside the usable share: a first
guess, to be measured."""


def attention_memory(
    shape: ModelShape, gpu: GpuProfile, *, lanes: int = 1, buffers: float = 0.0
) -> Memory:
    """A rank with attention, dense parts and KV cache; `buffers` of all lanes."""
    return _rest(gpu, shape.attention_weight_bytes, lanes, buffers)


def ffn_memory(
    shape: ModelShape, gpu: GpuProfile, owners: int, *, lanes: int = 1, buffers: float = 0.0
) -> Memory:
    """A rank with its share of the routed experts and no KV cache."""
    return _rest(gpu, shape.routed_weight_bytes / owners, lanes, buffers)


def colocated_memory(shape: ModelShape, gpu: GpuProfile, owners: int) -> Memory:
    """A rank with both; `owners` ranks share the experts."""
    return _rest(gpu, shape.attention_weight_bytes + shape.routed_weight_bytes / owners, 1, 0.0)


def cad_memory(
    shape: ModelShape, gpu: GpuProfile, owners: int, *, lanes: int = 1
) -> tuple[Memory, Memory]:
    """A rank with KV cache and core attention alone, and a rank with all weights' share."""
    weights = shape.attention_weight_bytes + shape.routed_weight_bytes / owners
    return _rest(gpu, 0.0, lanes, 0.0), _rest(gpu, weights, lanes, 0.0)


def transport_buffers(
    shape: ModelShape,
    transport: str,
    layout: Topology,
    cap: int,
    *,
    lanes: int = 1,
    block: int = _PREFILL_BLOCK,
    passing: bool = True,
) -> tuple[float, float]:
    """Bytes of buffers on an attention and on an FFN rank; `passing`: the rounds' tensors too."""
    rows = Rows(
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        top_k=shape.top_k,
        itemsize=shape.itemsize,
        fp8=shape.fp8,
        decode=whole("max tokens per rank", cap),
        block=whole("prefill block", block),
        lanes=whole("--lanes", lanes),
    )
    found = ESTIMATES["nvlink" if transport == FUSED else transport](layout, rows)
    times = lanes if transport == "deepep" else 1  # one buffer of its own for each lane
    attention, ffn = (float(times * (held.kept + passing * held.passing)) for held in found)
    return attention, ffn


def _rest(gpu: GpuProfile, weights: float, lanes: int, buffers: float) -> Memory:
    graphs = (lanes - 1) * LANE_BYTES
    return Memory(weights, buffers, graphs, gpu.memory * gpu.usable - weights - buffers - graphs)
