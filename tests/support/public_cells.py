"""Public FastAFD figures on GB200 NVL72, and the planner's predictions for the same inputs.

Inputs are the published batch sizes and ratios and the gb200 profile; wide EP's batch sizes are not
published, so they are the largest that the planner's memory model allows, in steps of 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sglang_afd.plan import ledger
from sglang_afd.plan.profile import GpuProfile, read_profile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.shape import ModelShape, read_shape
from sglang_afd.plan.step import Split, Step, afd, colocated
from sglang_afd.plan.workload import Workload

QWEN, MINIMAX = "qwen3-235b-a22b-fp8", "minimax-m2.5"
NODE = 4
"""GPUs of a node; the FFN role has one."""


@dataclass(frozen=True)
class Headline:
    """A published cell: batches, ratio and throughputs (tokens/s/GPU)."""

    model: str
    context: int
    batch: int
    base_batch: int
    ratio: int
    afd: float
    base: float
    speedup: float
    wide: float
    over_wide: float


HEADLINES = (
    Headline(QWEN, 8192, 96, 64, 7, 2518, 1781, 1.41, 2331.65, 0.0819),
    Headline(QWEN, 16384, 48, 32, 11, 1377, 954, 1.44, 1204.08, 0.1592),
    Headline(MINIMAX, 8192, 72, 48, 17, 2198, 1516, 1.45, 2218.89, 0.0160),
    Headline(MINIMAX, 16384, 36, 24, 17, 1006, 745, 1.35, 1118.73, -0.1008),
)
SWEEPS: dict[int, dict[int, float]] = {
    16384: {4: 1616, 5: 1684, 14: 1258, 15: 1239, 16: 1172},
    32768: {3: 850, 5: 881, 14: 805, 15: 825},
    65536: {3: 461, 5: 488, 8: 497, 15: 477},
    131072: {3: 226, 4: 240, 8: 247, 15: 251, 16: 248},
}
"""Qwen3-235B: context -> attention nodes per FFN node -> tokens/s/GPU."""
SWEPT_TOKENS = 48 * 16384
"""Of an attention GPU: the headline's batch at 16K, and as much cache at other contexts."""
WIDE = {8: 2271.76, 16: 2331.65, 32: 2304.92, 64: 1811.48}
"""Qwen3-235B at 8K: EP width -> tokens/s/GPU."""


@cache
def gb200() -> GpuProfile:
    return read_profile("gb200")


def predicted_afd(model: str, context: int, batch: int, nodes: int) -> Step:
    """AFD with `nodes` attention nodes and one FFN node, two lanes, FastAFD's fused kernel."""
    shape = read_shape(model)
    return afd(
        shape,
        gb200(),
        Routing(shape.experts, shape.top_k),
        Workload(context),
        Split(NODE * nodes, NODE, lanes=2, batch=batch, transport=ledger.FUSED),
    )


def predicted_ep(model: str, context: int, ranks: int, batch: int) -> Step:
    shape = read_shape(model)
    routing = Routing(shape.experts, shape.top_k)
    return colocated(shape, gb200(), routing, Workload(context), ranks=ranks, batch=batch)


def wide_batch(shape: ModelShape, context: int, ranks: int) -> int:
    room = ledger.colocated_memory(shape, gb200(), ranks).kv
    return int(room // Workload(context).request_bytes(shape)) // 4 * 4


def predicted_wide(model: str, context: int) -> dict[int, float]:
    """EP width -> tokens/s/GPU."""
    shape = read_shape(model)
    return {
        ranks: predicted_ep(model, context, ranks, wide_batch(shape, context, ranks)).per_gpu
        for ranks in WIDE
    }


def rows() -> list[tuple[str, float, float, float]]:
    """Every cell: its name, the prediction, the published figure, the allowed relative error."""
    found: list[tuple[str, float, float, float]] = []
    for cell in HEADLINES:
        name = f"{cell.model} {cell.context // 1024}K"
        split = predicted_afd(cell.model, cell.context, cell.batch, cell.ratio).per_gpu
        base = predicted_ep(cell.model, cell.context, NODE, cell.base_batch).per_gpu
        found += [
            (f"{name} AFD {cell.ratio}:1 tok/s/GPU", split, cell.afd, 0.15),
            (f"{name} EP4 tok/s/GPU", base, cell.base, 0.15),
            (f"{name} speed-up", split / base, cell.speedup, 0.05),
            (
                f"{name} best wide EP tok/s/GPU",
                max(predicted_wide(cell.model, cell.context).values()),
                cell.wide,
                0.15,
            ),
        ]
    found += [
        (f"{QWEN} 8K EP{ranks} tok/s/GPU", predicted, WIDE[ranks], 0.15)
        for ranks, predicted in predicted_wide(QWEN, 8192).items()
    ]
    found += [
        (
            f"{QWEN} {context // 1024}K sweep {nodes}:1 tok/s/GPU",
            swept(context, nodes),
            published,
            0.15,
        )
        for context, sweep in SWEEPS.items()
        for nodes, published in sweep.items()
    ]
    return found


def swept(context: int, nodes: int) -> float:
    """A cell of the sweep over ratios, tokens/s/GPU."""
    return predicted_afd(QWEN, context, SWEPT_TOKENS // context, nodes).per_gpu


def over_wide(cell: Headline) -> float:
    """AFD against the best wide EP, predicted."""
    split = predicted_afd(cell.model, cell.context, cell.batch, cell.ratio).per_gpu
    return split / max(predicted_wide(cell.model, cell.context).values()) - 1


def table() -> str:
    """The cells as docs/planner.md has them."""
    lines = ["| Cell | predicted | published | error | |", "|---|---|---|---|---|"]
    for name, predicted, published, allowed in rows():
        error = predicted / published - 1
        digits = 2 if published < 10 else 0
        lines.append(
            f"| {name} | {predicted:.{digits}f} | {published:.{digits}f} | {error:+.1%} | "
            f"{'' if abs(error) <= allowed else '**miss**'} |"
        )
    for cell in HEADLINES:
        predicted = over_wide(cell)
        hit = (predicted > 0) == (cell.over_wide > 0)
        lines.append(
            f"| {cell.model} {cell.context // 1024}K AFD against best wide EP | {predicted:+.1%} | "
            f"{cell.over_wide:+.1%} | | {'' if hit else '**miss** (sign)'} |"
        )
    return "\n".join(lines)
