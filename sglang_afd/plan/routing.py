"""Which experts tokens touch: uniform routing, or Zipf's with an exponent as its skew."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sglang_afd.plan.errors import PlanError, real, whole


@dataclass(frozen=True)
class Routing:
    """Expert `e`'s share of a token's choices is proportional to ``1 / rank(e)^skew``.

    Ranks are shuffled by `seed`, so that popular experts lie anywhere.
    """

    experts: int
    top_k: int
    skew: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole("experts", self.experts, most=10**6)
        whole("top_k", self.top_k, most=self.experts)
        real("skew", self.skew, most=4.0)

    def inclusion(self) -> np.ndarray:
        """Probability that a token chooses each expert: [experts], its sum is top_k."""
        return _inclusion(self)

    def touched(self, tokens: float, owners: int) -> np.ndarray:
        """Expected experts of each owner that at least one of `tokens` chooses: [owners]."""
        missed = (1 - self.inclusion()) ** tokens
        return (1 - missed).reshape(owners, -1).sum(axis=1)

    def share(self, owners: int) -> np.ndarray:
        """Each owner's share of all (token, expert) pairs: [owners], its sum is 1."""
        if self.experts % owners:
            raise PlanError("owners", f"{self.experts} experts do not divide over {owners}")
        return self.inclusion().reshape(owners, -1).sum(axis=1) / self.top_k

    def copies(self, owners: int) -> np.ndarray:
        """Share of the tokens that choose at least one expert of each owner: [owners]."""
        return 1 - (1 - self.share(owners)) ** self.top_k


@lru_cache(maxsize=256)
def _inclusion(routing: Routing) -> np.ndarray:
    """Sampling without replacement, as Poisson draws of one intensity that make the sum top_k."""
    experts, top_k = routing.experts, routing.top_k
    if routing.skew == 0 or top_k == experts:
        return np.full(experts, top_k / experts)
    weights = np.arange(1, experts + 1, dtype=float) ** -routing.skew
    weights = np.random.default_rng(routing.seed).permutation(weights / weights.sum())
    low, high = 0.0, 1.0
    while _chosen(weights, high).sum() < top_k:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _chosen(weights, middle).sum() < top_k else (low, middle)
    chosen = _chosen(weights, high)
    return chosen * (top_k / chosen.sum())


def _chosen(weights: np.ndarray, intensity: float) -> np.ndarray:
    return -np.expm1(-weights * intensity)
