"""The named modes, and what this build serves of each, read off its capability table."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd import features
from sglang_afd.families import FAMILIES
from sglang_afd.flags import GPU_LANES, GRAPH_TRANSPORTS
from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.shape import ModelShape

STAGES = ("decode", "prefill", "verify")


@dataclass(frozen=True)
class Contract:
    """What a mode may do: how many lanes, which stages, and whether in CUDA graphs."""

    mode: str
    lanes: tuple[int, ...]
    stages: tuple[str, ...]
    graphs: bool


def served(feature: str) -> bool:
    """Whether the capability table serves a feature, by its row's name.

    Raises:
        PlanError: there is no such row.
    """
    for row in features.FEATURES:
        if row.name == feature:
            return row.served
    raise PlanError("capability table", f"has no row {feature!r}")


def contract(mode: str, *, transport: str = "nvlink", design: bool = False) -> Contract:
    """What `mode` may do in this build over `transport`, or (`design`) once all is built.

    ``sync`` is one lane, ``async`` two and more; ``colocated`` is plain SGLang, which has graphs.

    Raises:
        PlanError: there is no such mode.
    """
    if mode not in ("sync", "async", "colocated"):
        raise PlanError("--mode", f"{mode} is not sync, async or colocated")
    if mode == "colocated":
        return Contract(mode, (1,), STAGES, True)
    lanes: tuple[int, ...] = (1,) if mode == "sync" else (2, 3, 4)
    if design:
        return Contract(mode, lanes, STAGES, True)
    lanes = tuple(count for count in lanes if count <= GPU_LANES.get(transport, 1))
    verify = served("Speculative decoding")
    stages = tuple(stage for stage in STAGES if verify or stage != "verify")
    graphs = served("CUDA graphs") and transport in GRAPH_TRANSPORTS
    return Contract(mode, lanes, stages if lanes else (), graphs)


def missing(shape: ModelShape, *, lanes: int, width: int, kind: str, transport: str) -> list[str]:
    """What a plan needs that this build does not serve, as phrases."""
    found = []
    if shape.architecture not in FAMILIES:
        found.append(f"{shape.architecture} under AFD")
    if kind == "cad" and transport != "gloo":
        found.append("core-attention disaggregation on GPUs")
    if transport not in ("nvlink", "deepep", "gloo"):
        found.append(f"the {transport} transport")
    mode = contract("sync" if lanes == 1 else "async", transport=transport)
    if lanes not in mode.lanes:
        found.append(f"{lanes} lanes")
    if not mode.graphs:
        found.append("CUDA graphs")
    if width > 1 and not served("Speculative decoding"):
        found.append("speculative decoding")
    return found
