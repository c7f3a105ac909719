"""Which world rank plays which role, and which FFN rank owns which expert.

Attention and FFN ranks are ranks of one world.  Counts are data-parallel (DP) ranks, each of
`attention_tp` world ranks: world ranks ``0 .. A*t-1`` are attention ranks (A), the last ``F*t`` are
FFN ranks (F).  Every F world rank owns a contiguous, equal slice of the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MOST_RANKS = 4096
"""Of each count: more than any deployment has, and few enough to count with."""


class Role(Enum):
    """What a rank holds: requests, KV cache and attention, or experts."""

    ATTENTION = "attention"
    FFN = "ffn"


class TopologyError(ValueError):
    """A layout that cannot be right; the message names the counts and the mend."""


@dataclass(frozen=True)
class Topology:
    """A deployment's layout: A attention and F FFN DP ranks of `attention_tp` world ranks each."""

    attention_ranks: int
    ffn_ranks: int
    attention_tp: int = 1

    def __post_init__(self) -> None:
        for name in ("attention_ranks", "ffn_ranks", "attention_tp"):
            flag = "--afd-" + name.replace("_", "-")
            if getattr(self, name) < 1:
                raise TopologyError(f"{flag} is {getattr(self, name)}; it must be at least 1")
            if getattr(self, name) > MOST_RANKS:
                raise TopologyError(
                    f"{flag} is {getattr(self, name)}; it must be at most {MOST_RANKS}"
                )

    @property
    def dp_size(self) -> int:
        """DP ranks of both roles, A + F: the size SGLang's data parallelism is set to."""
        return self.attention_ranks + self.ffn_ranks

    @property
    def world_size(self) -> int:
        """World ranks of both roles, (A + F) * attention_tp; one accelerator each."""
        return self.dp_size * self.attention_tp

    @property
    def attention_world(self) -> range:
        """World ranks of the attention role."""
        return range(self.attention_ranks * self.attention_tp)

    @property
    def ffn_world(self) -> range:
        """World ranks of the FFN role: the last ones."""
        return range(self.attention_ranks * self.attention_tp, self.world_size)

    def role_of(self, rank: int) -> Role:
        """The role of a world rank.

        Raises:
            TopologyError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside the world of {self.world_size} ranks")
        return Role.ATTENTION if rank in self.attention_world else Role.FFN

    def dp_rank_of(self, rank: int) -> int:
        """The DP rank a world rank belongs to."""
        return rank // self.attention_tp

    def name_of(self, rank: int) -> str:
        """How messages call a world rank: its DP rank in its role, e.g. ``FFN rank 0``.

        With attention TP, its place in the DP rank follows: ``attention rank 1.0``.

        Raises:
            TopologyError: there is no such rank.
        """
        role = "attention" if self.role_of(rank) is Role.ATTENTION else "FFN"
        number, place = divmod(rank, self.attention_tp)
        if role == "FFN":
            number -= self.attention_ranks
        inside = f".{place}" if self.attention_tp > 1 else ""
        return f"{role} rank {number}{inside} (world rank {rank})"

    def experts_per_rank(self, num_experts: int) -> int:
        """Experts that one F world rank owns in every MoE layer.

        Raises:
            TopologyError: `num_experts` does not divide evenly over the F world ranks.
        """
        owners = len(self.ffn_world)
        if num_experts % owners:
            fits = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise TopologyError(
                f"{num_experts} experts do not divide over {owners} FFN ranks "
                f"(--afd-ffn-ranks {self.ffn_ranks} x --afd-attention-tp {self.attention_tp}); "
                f"choose a product out of {', '.join(map(str, fits))}, or "
                f"{-num_experts % owners} more --afd-expert-replicas"
            )
        return num_experts // owners

    def experts_of(self, rank: int, num_experts: int) -> range:
        """The expert ids that F world rank `rank` owns.

        Raises:
            TopologyError: it is no F rank, or the experts do not divide evenly.
        """
        per_rank = self.experts_per_rank(num_experts)
        if self.role_of(rank) is Role.ATTENTION:
            raise TopologyError(f"{self.name_of(rank)} owns no experts")
        index = rank - self.ffn_world.start
        return range(index * per_rank, (index + 1) * per_rank)
