"""Rank allocation: every A:F of a budget, with the reason where one is refused."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.plan import ledger
from sglang_afd.plan.errors import PlanError, real, whole
from sglang_afd.plan.ledger import Memory
from sglang_afd.plan.profile import GpuProfile
from sglang_afd.plan.shape import ModelShape
from sglang_afd.plan.workload import Workload
from sglang_afd.topology import Topology, TopologyError
from sglang_afd.transport_gate import DEEPEP_MAX_SLOTS, DEEPEP_MAX_TOKENS

MAX_BATCH = 2**16
"""Requests of a GPU that are looked at."""


@dataclass(frozen=True)
class Layout:
    """Some of the GPUs as one group of a kind; the budget is `groups` equal ones."""

    kind: str
    """``colocated``, ``afd`` or ``cad``."""
    attention_ranks: int
    ffn_ranks: int
    """0: colocated."""
    lanes: int
    groups: int
    attention: Memory
    ffn: Memory | None
    batch: int
    """Most requests of a GPU with requests."""

    @property
    def name(self) -> str:
        """As tables have it, e.g. ``6A2F`` or ``2 x EP4``."""
        one = f"{self.attention_ranks}A{self.ffn_ranks}F"
        if self.kind == "colocated":
            one = f"EP{self.attention_ranks}"
        if self.kind == "cad":
            one += " cad"
        return one if self.groups == 1 else f"{self.groups} x {one}"


@dataclass(frozen=True)
class Refused:
    """A layout that cannot be, and why."""

    name: str
    reason: str


def split(world: int, attention_pressure: float, ffn_pressure: float) -> tuple[int, int]:
    """Ranks of each role in proportion to its load, at least one each.

    Raises:
        PlanError: there are fewer than two ranks, or a pressure is no number or both are 0.
    """
    whole("world", world, least=2, most=10**6)
    attention = real("attention pressure", attention_pressure)
    ffn = real("FFN pressure", ffn_pressure)
    if attention + ffn <= 0:
        raise PlanError("attention pressure", "both pressures are 0")
    ranks = min(max(round(world * attention / (attention + ffn)), 1), world - 1)
    return ranks, world - ranks


def layouts(
    shape: ModelShape,
    gpu: GpuProfile,
    load: Workload,
    gpus: int,
    *,
    transport: str = "nvlink",
    lanes: tuple[int, ...] = (1, 2),
    kinds: tuple[str, ...] = ("colocated", "afd", "cad"),
) -> tuple[list[Layout], list[Refused]]:
    """Every layout of `gpus`, and those that cannot be.

    EP widths and AFD groups are the divisors of `gpus`, as equal replicas.
    """
    whole("--gpus", gpus, most=4096)
    good: list[Layout] = []
    bad: dict[str, Refused] = {}
    for size in (n for n in range(1, gpus + 1) if gpus % n == 0):
        if "colocated" in kinds:
            _sort(_colocated(shape, gpu, load, size, gpus // size), good, bad)
        for kind in ("afd", "cad"):
            for attention in range(1, size) if kind in kinds else ():
                for count in lanes:
                    found = _split(
                        shape, gpu, load, transport, kind, attention, size, count, gpus // size
                    )
                    _sort(found, good, bad)
    possible = {one_group(layout) for layout in good}
    return good, [refused for name, refused in bad.items() if name not in possible]


def one_group(layout: Layout) -> str:
    """The name of one of its groups."""
    return layout.name.rpartition(" x ")[2]


def _sort(found: Layout | Refused, good: list[Layout], bad: dict[str, Refused]) -> None:
    if isinstance(found, Layout):
        good.append(found)
    else:
        bad.setdefault(found.name, found)


def _colocated(
    shape: ModelShape, gpu: GpuProfile, load: Workload, size: int, groups: int
) -> Layout | Refused:
    name = f"EP{size}"
    if size > gpu.domain:
        return Refused(name, f"{size} GPUs do not reach each other; {gpu.domain} do")
    if shape.experts % size:
        return Refused(name, f"{shape.experts} experts do not divide over {size} GPUs")
    memory = ledger.colocated_memory(shape, gpu, size)
    batch = min(int(max(memory.kv, 0) // load.request_bytes(shape)), MAX_BATCH)
    if batch < 1:
        return Refused(name, _no_room("GPU", memory, load.request_bytes(shape)))
    return Layout("colocated", size, 0, 1, groups, memory, None, batch)


def _split(
    shape: ModelShape,
    gpu: GpuProfile,
    load: Workload,
    transport: str,
    kind: str,
    attention: int,
    size: int,
    lanes: int,
    groups: int,
) -> Layout | Refused:
    ffn = size - attention
    name = f"{attention}A{ffn}F" + (" cad" if kind == "cad" else "")
    topology = Topology(attention, ffn)
    try:
        per_rank = topology.experts_per_rank(shape.experts)
    except TopologyError:
        return Refused(name, f"{shape.experts} experts do not divide over {ffn} FFN ranks")
    if size > gpu.domain:
        return Refused(name, f"{size} GPUs do not reach each other; {gpu.domain} do")
    if kind == "cad" and shape.state_bytes:
        return Refused(name, "linear attention keeps its state with its projections")
    if kind == "afd" and transport == "deepep" and per_rank * size > DEEPEP_MAX_SLOTS:
        return Refused(name, f"deepep would need {per_rank * size} of {DEEPEP_MAX_SLOTS} slots")
    request = load.request_bytes(shape)

    def held(batch: int) -> tuple[Memory, Memory]:
        """Memory of a rank of each role with buffers for a batch."""
        if kind == "cad":
            return ledger.cad_memory(shape, gpu, ffn, lanes=lanes)
        cap = -(-batch * load.width // lanes)
        if transport == "deepep":
            cap = min(cap, DEEPEP_MAX_TOKENS)
        sizes = ledger.transport_buffers(shape, transport, topology, cap, lanes=lanes)
        return (
            ledger.attention_memory(shape, gpu, lanes=lanes, buffers=sizes[0]),
            ledger.ffn_memory(shape, gpu, ffn, lanes=lanes, buffers=sizes[1]),
        )

    def fits(batch: int) -> bool:
        memory, other = held(batch)
        return other.kv >= 0 and memory.kv >= batch * request

    if not fits(lanes):
        memory, other = held(lanes)
        if other.kv < 0:
            return Refused(name, f"an FFN rank lacks {-other.kv / 1e9:.1f} GB for its experts")
        return Refused(name, _no_room("attention rank", memory, request * lanes))
    low, high = lanes, MAX_BATCH + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Layout(kind, attention, ffn, lanes, groups, *held(low), low)


def _no_room(where: str, memory: Memory, wanted: float) -> str:
    if memory.kv < 0:
        return f"its weights and buffers exceed the usable memory by {-memory.kv / 1e9:.1f} GB"
    return (
        f"{memory.kv / 1e9:.1f} GB are left for KV cache on each {where}, and the fewest requests "
        f"need {wanted / 1e9:.1f} GB"
    )
