"""Requests that arrive while others are decoded: what latencies a rate of them gets.

One attention rank stands for all (they are alike).  Between decode steps it prefills what waits, if
its batch has room; step times come from the closed form at the batch's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_afd.plan.errors import PlanError, real, whole
from sglang_afd.plan.search import Candidate, Question, step_of

_GRID = 9


@dataclass(frozen=True)
class Latencies:
    """What requests saw.  Seconds; percentiles 50, 90, 99."""

    requests: int
    rate: float
    """Requests a second of one attention rank."""
    ttft: tuple[float, float, float]
    tpot: tuple[float, float, float]
    goodput: float
    """Share of the requests within both targets."""


def prefill_seconds(question: Question, candidate: Candidate) -> float:
    """A prompt's prefill on its rank: bound by FLOPs, at the GEMMs' efficiency.

    Attention ranks and FFN ranks work at the same time on different prompts, so the slower counts.
    """
    shape, gpu, layout = question.shape, question.gpu, candidate.layout
    rate = (gpu.fp8_flops if shape.fp8 else gpu.bf16_flops) * gpu.math_efficiency
    tokens = question.load.context
    dense = float((shape.each("projections") + shape.each("dense")).sum())
    scores = tokens / 2 * float(shape.each("score_flops").sum())
    routed = 3 * shape.hidden * shape.intermediate * shape.top_k * shape.moe_layers
    attention = (2 * dense + scores) * tokens / rate
    experts = 2 * routed * tokens / rate
    if layout.kind == "colocated":
        return attention + experts
    if layout.kind == "cad":
        attention, experts = (
            scores * tokens / rate,
            (2 * dense + 2 * routed) * tokens / rate,
        )
    return max(attention, experts * layout.attention_ranks / layout.ffn_ranks)


def serve(
    question: Question,
    candidate: Candidate,
    *,
    rate: float,
    requests: int = 400,
    seed: int = 0,
    ttft_target: float | None = None,
) -> Latencies:
    """Play Poisson arrivals of `rate` requests a second on one attention rank.

    Raises:
        PlanError: requests generate nothing, or the rate is no positive number.
    """
    real("--rate", rate, above=0.0, most=1e6)
    whole("requests", requests, most=10**6)
    output = question.load.output
    if output < 1:
        raise PlanError("--output", "arrivals need at least one generated token")
    arrived = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))
    step_seconds = _interpolated(question, candidate)
    prefill = prefill_seconds(question, candidate)
    steps_each = max(1, round(output / question.load.accepted))
    cap = int(candidate.step.batch)
    waiting = deque(range(requests))
    left: dict[int, int] = {}
    now, first, last = 0.0, np.zeros(requests), np.zeros(requests)
    while waiting or left:
        if not left and arrived[waiting[0]] > now:
            now = float(arrived[waiting[0]])
        if waiting and len(left) < cap and arrived[waiting[0]] <= now:
            request = waiting.popleft()
            now += prefill
            first[request], left[request] = now, steps_each
            continue
        quiet = min(left.values())
        if waiting and len(left) < cap:  # play steps up to the next arrival at once
            seconds = step_seconds(len(left))
            quiet = min(quiet, max(1, int(np.ceil((arrived[waiting[0]] - now) / seconds))))
        now += quiet * step_seconds(len(left))
        for request in [r for r in left if left[r] == quiet]:
            last[request] = now
        left = {r: n - quiet for r, n in left.items() if n > quiet}
    ttft, tpot = first - arrived, (last - first) / output
    good = np.ones(requests, dtype=bool)
    if ttft_target is not None:
        good &= ttft <= ttft_target
    if question.tpot is not None:
        good &= tpot <= question.tpot
    return Latencies(requests, rate, _percentiles(ttft), _percentiles(tpot), float(good.mean()))


def _interpolated(question: Question, candidate: Candidate) -> Callable[[int], float]:
    layout, most = candidate.layout, candidate.step.batch
    sizes = np.linspace(min(layout.lanes, most), most, _GRID)
    seconds = [step_of(question, layout, float(size)).seconds for size in sizes]
    return lambda batch: float(np.interp(batch, sizes, seconds))


def _percentiles(values: np.ndarray) -> tuple[float, float, float]:
    fifty, ninety, most = np.percentile(values, (50, 90, 99))
    return float(fifty), float(ninety), float(most)
