"""Emulated ranks: what a deployment is measured as, and which part of it is there.

For studies on few accelerators.  FFN ranks serve the rows of more attention ranks than there are,
and own no more experts than if there were more FFN ranks; what has no rank is stood in for:

* A real attention rank sends, beside its own rows of every decode round, as many for each rank that
  it stands for, routed by draws of their own; what comes back for them goes to scratch memory.
* Rows are not sent to experts of FFN ranks that are not there, nor waited for; they add nothing.
* Emulated ranks prefill nothing, and come no later than the rank that stands for them.

So times are a larger deployment's, and answers are not the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_afd.topology import Mode, Role, Topology

SEED = 20261130
"""Of the draws; the rank and the lane come on top."""
DRAWS = 37
"""Exchanges until the draws come again.  A prime that is no model's number of layers, so that in
time every layer sees all of them."""


@dataclass(frozen=True)
class Emulation:
    """A deployment that stands for another one; for itself, if nothing is emulated.

    The real ranks of a role are the first ones of the whole.  A *source* is an attention world rank
    of the whole, by its number there: for real ranks their world rank.
    """

    real: Topology
    whole: Topology
    """The deployment that is measured, of at least as many ranks of each role."""

    @classmethod
    def none(cls, topology: Topology) -> Emulation:
        """Nothing is emulated."""
        return cls(topology, topology)

    @property
    def active(self) -> bool:
        """Whether anything is emulated."""
        return self.real != self.whole

    @property
    def served(self) -> Topology:
        """What a decode exchange looks like to the FFN ranks that are there: all sources, them."""
        real = self.real
        if real.mode is Mode.CAD:  # nothing is emulated
            return real
        return Topology(self.whole.attention_ranks, real.ffn_ranks, real.attention_tp)

    def host_of(self, source: int) -> int:
        """The real world rank that sends a source's rows."""
        return source % len(self.real.leading_world)

    def emulated_by(self, rank: int) -> range:
        """The sources that the attention world rank `rank` stands for beside itself."""
        real = len(self.real.leading_world)
        return range(rank + real, len(self.whole.leading_world), real)

    def name_of(self, source: int) -> str:
        """How messages call a source."""
        host = self.real.name_of(self.host_of(source))
        return host if self.is_real(source) else f"emulated source {source} of {host}"

    def is_real(self, source: int) -> bool:
        """Whether a source is a rank."""
        return source in self.real.leading_world

    def experts_of(self, rank: int, num_experts: int) -> range:
        """The expert ids that the real FFN world rank `rank` owns.

        Raises:
            TopologyError: it is no FFN rank, or the experts do not divide evenly over the whole's.
        """
        if self.real.role_of(rank) is Role.ATTENTION:
            return self.real.experts_of(rank, num_experts)  # which says that it owns none
        index = rank - self.real.ffn_world.start
        return self.whole.experts_of(self.whole.ffn_world[index], num_experts)

    def present_experts(self, num_experts: int) -> int:
        """Experts of a layer that a rank owns: the first ones; no rank owns those after them."""
        return len(self.real.ffn_world) * self.whole.experts_per_rank(num_experts)

    def described(self) -> dict[str, Any] | None:
        """The mark of what is served and recorded; None if nothing is emulated."""
        if not self.active:
            return None
        return {
            "attention_ranks": self.whole.attention_ranks,
            "ffn_ranks": self.whole.ffn_ranks,
            "real_attention_ranks": self.real.attention_ranks,
            "real_ffn_ranks": self.real.ffn_ranks,
            "routing": f"uniform over all experts, independent draws, seed {SEED}",
            "straggler_spread_us": 0,
            "note": "answers are not the model's; emulated ranks take part in decode steps alone",
        }
