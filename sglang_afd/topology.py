"""Which world rank plays which role, and which FFN rank owns which expert.

All ranks are of one world.  Counts are data-parallel (DP) ranks, each of `attention_tp` world
ranks.  The first world ranks *lead*: they hold the requests; the others *serve* them, layer by
layer.  In AFD mode attention ranks (A) lead and FFN ranks (F) serve, each of which owns a
contiguous, equal slice of the experts.  In CAD mode model ranks (M) lead, which hold all but the KV
cache and attention, and attention ranks serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MOST_RANKS = 4096
"""Of each count: more than any deployment has, and few enough to count with."""


class Mode(Enum):
    """Where a layer is cut in two."""

    AFD = "afd"
    """Around the routed experts."""
    CAD = "cad"
    """Around core attention: KV cache and attention on ranks of their own."""


class Role(Enum):
    """What a rank holds: attention (AFD: all but the experts; CAD: only its KV cache), experts, or
    (CAD) all but attention."""

    ATTENTION = "attention"
    FFN = "ffn"
    MODEL = "model"


COMMANDS = (Role.ATTENTION, Role.FFN)
"""Roles that a command of its own may start (``--afd-role``)."""
_NAMES = {Role.ATTENTION: "attention", Role.FFN: "FFN", Role.MODEL: "model"}


OTHER_ROLE = {Mode.AFD: "FFN", Mode.CAD: "model"}
"""How messages call the ranks that are not attention ranks."""


class TopologyError(ValueError):
    """A layout that cannot be right; the message names the counts and the mend."""


@dataclass(frozen=True)
class Topology:
    """A deployment's layout: A attention and F FFN DP ranks of `attention_tp` world ranks each."""

    attention_ranks: int
    ffn_ranks: int
    """In CAD mode the model ranks, which run the experts too."""
    attention_tp: int = 1
    mode: Mode = Mode.AFD

    def __post_init__(self) -> None:
        for name in ("attention_ranks", "ffn_ranks", "attention_tp"):
            flag = "--afd-" + name.replace("_", "-")
            if self.mode is Mode.CAD:
                flag = flag.replace("ffn", "model")
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
    def leading_ranks(self) -> int:
        """DP ranks that hold requests: the first ones."""
        return self.attention_ranks if self.mode is Mode.AFD else self.ffn_ranks

    @property
    def leading_world(self) -> range:
        """World ranks of the role that holds requests: the first ones."""
        return range(self.leading_ranks * self.attention_tp)

    @property
    def serving_world(self) -> range:
        """World ranks of the role that serves them: the last ones."""
        return range(self.leading_ranks * self.attention_tp, self.world_size)

    @property
    def serving_name(self) -> str:
        """How messages call ranks that serve."""
        return _NAMES[self.role_of(self.world_size - 1)]

    @property
    def attention_world(self) -> range:
        """World ranks of the attention role."""
        return self.leading_world if self.mode is Mode.AFD else self.serving_world

    @property
    def ffn_world(self) -> range:
        """World ranks that own experts: FFN ranks, or (CAD) model ranks."""
        return self.serving_world if self.mode is Mode.AFD else self.leading_world

    def leads(self, rank: int) -> bool:
        """Whether a world rank holds requests."""
        return rank in self.leading_world

    def role_of(self, rank: int) -> Role:
        """The role of a world rank.

        Raises:
            TopologyError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside the world of {self.world_size} ranks")
        if rank in self.attention_world:
            return Role.ATTENTION
        return Role.FFN if self.mode is Mode.AFD else Role.MODEL

    def dp_rank_of(self, rank: int) -> int:
        """The DP rank a world rank belongs to."""
        return rank // self.attention_tp

    def name_of(self, rank: int) -> str:
        """How messages call a world rank: its DP rank in its role, e.g. ``FFN rank 0``.

        With attention TP, its place in the DP rank follows: ``attention rank 1.0``.

        Raises:
            TopologyError: there is no such rank.
        """
        role = _NAMES[self.role_of(rank)]
        number, place = divmod(rank, self.attention_tp)
        if not self.leads(rank):
            number -= self.leading_ranks
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
