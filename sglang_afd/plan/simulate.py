"""The simulator: a decode step as events on ranks, links and lanes.

Each (lane, layer) is an attention stage on every attention rank, a wait for all of its rows on
every FFN rank, an FFN stage there, and a wait for all results.  A rank serves lanes in turn.  What
the closed form leaves out is here: draws of routing, stragglers, lanes that wait for each other,
step boundaries.  Deterministic by seed; the ranks are numpy's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_afd.plan import kernels
from sglang_afd.plan.errors import real, whole
from sglang_afd.plan.profile import GpuProfile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.shape import ModelShape
from sglang_afd.plan.step import Split, Stages, afd_stages
from sglang_afd.plan.workload import Workload


@dataclass(frozen=True)
class Noise:
    """What makes a simulated step differ from the closed form."""

    draws: bool = False
    """Rows of each FFN rank are drawn, layer by layer, in place of their expectation."""
    straggle: float = 0.0
    """Standard deviation of each rank's own speed in a step, as a share."""
    host_gap: float = 0.0
    """Seconds between steps in which no rank works."""
    barrier: bool = False
    """Lanes start a step together, in place of each as soon as it can."""
    seed: int = 0

    def __post_init__(self) -> None:
        real("straggle", self.straggle, most=1.0)
        real("host_gap", self.host_gap, most=10.0)
        whole("seed", self.seed, least=0, most=2**32 - 1)


@dataclass(frozen=True)
class Span:
    """One stage in a trace: seconds from the trace's start."""

    role: str
    lane: int
    layer: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """Simulated steps of one deployment."""

    steps: np.ndarray
    """Seconds of each step, the first (warm-up) left out."""
    attention_busy: float
    """Share of the time that the attention ranks work."""
    ffn_busy: float
    trace: list[Span]
    """Stages of the last step on the first rank of each role."""

    @property
    def seconds(self) -> float:
        """Mean step."""
        return float(self.steps.mean())


def simulate(
    stages: Stages,
    *,
    attention_ranks: int,
    ffn_ranks: int,
    lanes: int,
    steps: int = 4,
    noise: Noise = Noise(),
    shares: np.ndarray | None = None,
) -> Simulated:
    """Play `steps` steps after a warm-up.

    Args:
        stages: one lane's stages with expected routing.
        shares: factor of each FFN stage, [steps + 1, layers, lanes, ffn_ranks], where rows are
            drawn; None: all ranks alike.
    """
    whole("lanes", lanes, most=8)
    whole("steps", steps, most=10_000)
    layers = len(stages.attention)
    rng = np.random.default_rng(noise.seed)
    free_a, free_f = np.zeros(attention_ranks), np.zeros(ffn_ranks)
    ready = np.zeros((lanes, attention_ranks))
    ends, busy = [], np.zeros(2)
    trace: list[Span] = []
    for number in range(steps + 1):
        slow_a = _speeds(rng, attention_ranks, noise.straggle)
        slow_f = _speeds(rng, ffn_ranks, noise.straggle)
        trace = []
        for layer in range(layers):
            # a lane's head comes before its next step's first layer (CAD: after the last layer)
            head_a = stages.head if layer == 0 and not stages.head_on_ffn else 0.0
            head_f = stages.head if layer == layers - 1 and stages.head_on_ffn else 0.0
            a = (stages.attention[layer] + head_a) * slow_a
            f = stages.ffn[layer] * slow_f
            for lane in range(lanes):
                start = np.maximum(free_a, ready[lane])
                free_a = start + a
                trace.append(Span("attention", lane, layer, float(start[0]), float(free_a[0])))
                busy[0] += a.mean()
                if stages.ffn[layer] == 0:  # a dense layer: no exchange
                    ready[lane] = free_a
                    continue
                own = (f if shares is None else f * shares[number, layer, lane]) + head_f
                begin = np.maximum(free_f, free_a.max() + stages.out[layer])
                free_f = begin + own
                trace.append(Span("ffn", lane, layer, float(begin[0]), float(free_f[0])))
                ready[lane] = free_f.max() + stages.back[layer]
                busy[1] += own.mean()
        if noise.barrier:
            ready[:] = max(ready.max(), free_f.max())
        ready += noise.host_gap
        ends.append(float(ready.max()))
    begun = trace[0].start if trace else 0.0
    trace = [Span(s.role, s.lane, s.layer, s.start - begun, s.end - begun) for s in trace]
    return Simulated(
        steps=np.diff(ends),
        attention_busy=float(busy[0] / ends[-1]),
        ffn_busy=float(busy[1] / ends[-1]),
        trace=trace,
    )


def simulate_afd(
    shape: ModelShape,
    gpu: GpuProfile,
    routing: Routing,
    load: Workload,
    split: Split,
    *,
    steps: int = 4,
    noise: Noise = Noise(),
) -> Simulated:
    """Simulate an AFD deployment; with `noise.draws`, every layer's rows are drawn anew."""
    shares = None
    if noise.draws:
        rows = split.rows(load) * split.attention_ranks
        draws = (steps + 1, len(shape.layers), split.lanes)
        shares = drawn_factors(shape, gpu, routing, rows, split.ffn_ranks, draws, noise.seed)
    return simulate(
        afd_stages(shape, gpu, routing, load, split),
        attention_ranks=split.attention_ranks,
        ffn_ranks=split.ffn_ranks,
        lanes=split.lanes,
        steps=steps,
        noise=noise,
        shares=shares,
    )


def drawn_factors(
    shape: ModelShape,
    gpu: GpuProfile,
    routing: Routing,
    tokens: float,
    owners: int,
    draws: tuple[int, int, int],
    seed: int,
) -> np.ndarray:
    """Drawn experts' time on each owner as a factor of the busiest's expected: [*draws, owners].

    Rows of an expert are a multinomial draw of all (token, expert) pairs; an expert without rows is
    not read.
    """
    pairs = max(1, round(tokens * routing.top_k))
    share = routing.inclusion() / routing.inclusion().sum()
    rows = np.random.default_rng(seed).multinomial(pairs, share, size=draws)
    rows = rows.reshape(*draws, owners, -1)
    touched, rows = (rows > 0).sum(axis=-1), rows.sum(axis=-1)
    drawn = kernels.grouped_seconds(shape, gpu, touched.astype(float), rows.astype(float))
    return drawn / kernels.expert_seconds(shape, gpu, routing, tokens, owners).max()


def _speeds(rng: np.random.Generator, ranks: int, straggle: float) -> np.ndarray:
    """Each rank's slowness in a step: 1, or above it by a half-normal draw."""
    if straggle == 0:
        return np.ones(ranks)
    return 1 + np.abs(rng.normal(0.0, straggle, ranks))
