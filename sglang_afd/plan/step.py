"""The closed form of a decode step: colocated expert parallelism, AFD, and CAD.

A step of AFD with one lane is serial.  With more, each of the lanes is always at some stage, so a
step takes the longest of three: all lanes' attention (Ta), all lanes' experts (Te), and one lane's
own way through all layers (the path).  `simulate` plays the same stages as events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_afd.plan import kernels, ledger
from sglang_afd.plan.errors import PlanError, real, whole
from sglang_afd.plan.profile import GpuProfile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.shape import ModelShape
from sglang_afd.plan.workload import Workload

MAX_LANES = 8


@dataclass(frozen=True)
class Split:
    """A split deployment's GPUs, and how it serves a step.

    Raises:
        PlanError: a number is out of range.
    """

    attention_ranks: int
    """A: GPUs with requests."""
    ffn_ranks: int
    """F: GPUs without (CAD: the model ranks)."""
    lanes: int
    batch: float
    """Requests of each attention rank."""
    transport: str = "nvlink"
    """AFD: how rows travel."""
    graphs: bool = True
    """It decodes in CUDA graphs."""

    def __post_init__(self) -> None:
        whole("attention ranks", self.attention_ranks, most=4096)
        whole("FFN ranks", self.ffn_ranks, most=4096)
        real("--batch", self.batch, above=0.0, most=1e7)
        whole("--lanes", self.lanes, most=MAX_LANES)

    def rows(self, load: Workload) -> float:
        """Rows of a lane's decode step on one attention rank."""
        return self.batch / self.lanes * load.width


@dataclass(frozen=True)
class Stages:
    """Seconds of one lane's stages in a step; arrays are [layers]."""

    attention: np.ndarray
    """On an attention rank (CAD: core attention alone)."""
    out: np.ndarray
    ffn: np.ndarray
    """On the busiest FFN rank (CAD: on a model rank)."""
    back: np.ndarray
    head: float
    """lm_head and sampling, once a step, on an attention rank (CAD: a model rank)."""
    link: float
    """The busiest link of an FFN rank, one way, all layers."""
    head_on_ffn: bool = False

    @property
    def ta(self) -> float:
        """The lane's attention rank, all layers."""
        return float(self.attention.sum()) + (0.0 if self.head_on_ffn else self.head)

    @property
    def te(self) -> float:
        """The lane's FFN rank, all layers."""
        return float(self.ffn.sum()) + (self.head if self.head_on_ffn else 0.0)

    @property
    def exchange(self) -> float:
        """Rows under way, all layers."""
        return float(self.out.sum() + self.back.sum())

    @property
    def path(self) -> float:
        """The lane's own way through a step."""
        return self.ta + self.te + self.exchange


@dataclass(frozen=True)
class Step:
    """A predicted decode step.  Seconds; `ta` and `te` are those of all lanes."""

    kind: str
    """``colocated``, ``afd`` or ``cad``."""
    attention_ranks: int
    """GPUs with requests."""
    ffn_ranks: int
    """GPUs without; 0 where both share a GPU."""
    lanes: int
    batch: float
    """Requests of each GPU with requests."""
    ta: float
    te: float
    exchange: float
    """One lane's rows under way; colocated: all dispatch and combine."""
    seconds: float
    accepted: float = 1.0

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.attention_ranks + self.ffn_ranks

    @property
    def exposed(self) -> float:
        """Part of the step that neither role's own work explains."""
        busy = self.ta + self.te if self.kind == "colocated" else max(self.ta, self.te)
        return max(0.0, self.seconds - busy)

    @property
    def overlap_efficiency(self) -> float:
        """max(Ta, Te) / step."""
        return max(self.ta, self.te) / self.seconds

    @property
    def per_gpu(self) -> float:
        """Tokens a second and GPU."""
        return self.attention_ranks * self.batch * self.accepted / self.seconds / self.gpus

    @property
    def tpot(self) -> float:
        """Seconds that a request waits for a token."""
        return self.seconds / self.accepted


def exposed_seconds(attention: float, out: float, ffn: float, back: float, budget: float) -> float:
    """What a layer's stages cost when at most `budget` of the exchange and experts is hidden.

    Never less than attention's own time.
    """
    for field, value in (("attention", attention), ("out", out), ("ffn", ffn), ("back", back)):
        real(field, value)
    real("budget", budget)
    return attention + out + ffn + back - min(budget, out + ffn + back)


def ffn_hides(lanes: int, expert_bytes: float, bandwidth: float, ta: float) -> bool:
    """The rule of thumb: reading a rank's experts once a lane takes no longer than attention."""
    return lanes * expert_bytes / real("bandwidth", bandwidth, above=0.0) <= ta


def colocated(
    shape: ModelShape,
    gpu: GpuProfile,
    routing: Routing,
    load: Workload,
    *,
    ranks: int,
    batch: float,
    graphs: bool = True,
) -> Step:
    """Attention data-parallel and experts expert-parallel over the same `ranks` GPUs, serial."""
    whole("ranks", ranks, most=4096)
    real("--batch", batch, above=0.0, most=1e7)
    tokens = batch * load.width
    core = kernels.core_seconds(shape, gpu, batch, load.width, load.held, load.kv_itemsize)
    dense = kernels.dense_seconds(shape, gpu, tokens, graphs)
    ta = float((core + dense).sum()) + kernels.head_seconds(shape, gpu, tokens)
    experts = kernels.expert_seconds(shape, gpu, routing, tokens * ranks, ranks).max()
    exchange = shape.moe_layers * collective_seconds(shape, gpu, routing, tokens, ranks)
    te = shape.moe_layers * float(experts)
    seconds = ta + te + exchange
    return Step("colocated", ranks, 0, 1, batch, ta, te, exchange, seconds, load.accepted)


def collective_seconds(
    shape: ModelShape, gpu: GpuProfile, routing: Routing, tokens: float, ranks: int
) -> float:
    """Dispatch and combine of one layer among `ranks` GPUs of `tokens` each: a copy an expert."""
    if ranks == 1:
        return 0.0
    cost = ledger.travel(shape, "deepep", routing, ranks)
    busiest = float(routing.share(ranks).max()) * ranks
    moved = tokens * busiest * (cost.out + cost.back) * (ranks - 1) / ranks
    latency = gpu.collective_seconds + ranks * gpu.collective_peer_seconds
    return latency + moved / (gpu.link * gpu.link_efficiency)


def afd_stages(
    shape: ModelShape, gpu: GpuProfile, routing: Routing, load: Workload, split: Split
) -> Stages:
    """One lane's stages under AFD, FFN stages with expected routing."""
    requests, tokens = split.batch / split.lanes, split.rows(load)
    core = kernels.core_seconds(shape, gpu, requests, load.width, load.held, load.kv_itemsize)
    dense = kernels.dense_seconds(shape, gpu, tokens, split.graphs)
    ffn_ranks, everyone = split.ffn_ranks, tokens * split.attention_ranks
    cost = ledger.travel(shape, split.transport, routing, ffn_ranks)
    # the busiest FFN rank's share of all bytes
    share = routing.share(ffn_ranks) if split.transport == "deepep" else routing.copies(ffn_ranks)
    most = float(share.max() / share.sum())
    rate = gpu.link * gpu.link_efficiency
    gather, scatter = everyone * cost.out * most / rate, everyone * cost.back * most / rate
    experts = float(kernels.expert_seconds(shape, gpu, routing, everyone, ffn_ranks).max())
    latency = gpu.signal_seconds
    if split.transport == "deepep":  # every rank waits for every other, both ways
        peers = (split.attention_ranks + ffn_ranks) * gpu.collective_peer_seconds
        latency = (gpu.collective_seconds + peers) / 2
    out = latency + tokens * cost.out / rate
    back = latency + max(0.0, tokens * cost.back / rate - scatter)
    if split.transport == ledger.FUSED:
        # one kernel takes rows as they come and returns tiles as they are done
        ffn = max(experts, gather, scatter)
    else:
        out = max(out, latency + gather)
        ffn = experts + scatter
    moe = shape.moe
    return Stages(
        attention=core + dense,
        out=out * moe,
        ffn=ffn * moe,
        back=back * moe,
        head=kernels.head_seconds(shape, gpu, tokens),
        link=max(gather, scatter) * shape.moe_layers,
    )


def cad_stages(
    shape: ModelShape, gpu: GpuProfile, routing: Routing, load: Workload, split: Split
) -> Stages:
    """One lane's stages with core attention alone on the attention ranks.

    Raises:
        PlanError: the model has linear attention, whose state lies with its projections.
    """
    if (shape.each("state_bytes") > 0).any():
        raise PlanError("--mode", "cad does not fit linear attention: its state is no KV cache")
    requests, tokens = split.batch / split.lanes, split.rows(load)
    core = kernels.core_seconds(shape, gpu, requests, load.width, load.held, load.kv_itemsize)
    ffn_ranks, everyone = split.ffn_ranks, tokens * split.attention_ranks
    each = everyone / ffn_ranks
    dense = kernels.dense_seconds(shape, gpu, each, split.graphs)
    experts = float(kernels.expert_seconds(shape, gpu, routing, everyone, ffn_ranks).max())
    experts += collective_seconds(shape, gpu, routing, each, ffn_ranks)
    rate = gpu.link * gpu.link_efficiency
    busiest = max(tokens, each)
    out = gpu.signal_seconds + busiest * shape.each("core_in") * shape.itemsize / rate
    back = gpu.signal_seconds + busiest * shape.each("core_out") * shape.itemsize / rate
    return Stages(
        attention=core,
        out=out,
        ffn=dense + experts * shape.moe,
        back=back,
        head=kernels.head_seconds(shape, gpu, each),
        link=float(np.maximum(out, back).sum()),
        head_on_ffn=True,
    )


def combine(stages: Stages, kind: str, split: Split, accepted: float = 1.0) -> Step:
    """The step of equal lanes with these stages."""
    lanes = split.lanes
    ta, te = lanes * stages.ta, lanes * stages.te
    bounds = [stages.path] if lanes == 1 else [stages.path, ta, te, lanes * stages.link]
    return Step(
        kind,
        split.attention_ranks,
        split.ffn_ranks,
        lanes,
        split.batch,
        ta,
        te,
        stages.exchange,
        max(bounds),
        accepted,
    )


def afd(shape: ModelShape, gpu: GpuProfile, routing: Routing, load: Workload, split: Split) -> Step:
    """AFD: attention on A ranks, experts on F FFN ranks."""
    stages = afd_stages(shape, gpu, routing, load, split)
    return combine(stages, "afd", split, load.accepted)


def cad(shape: ModelShape, gpu: GpuProfile, routing: Routing, load: Workload, split: Split) -> Step:
    """CAD: core attention and KV cache on A ranks, all weights on F model ranks."""
    stages = cad_stages(shape, gpu, routing, load, split)
    return combine(stages, "cad", split, load.accepted)
