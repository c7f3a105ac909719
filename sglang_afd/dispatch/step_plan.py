"""The step plan: what every rank sends in one step, agreed before any row travels.

Each rank appends a `PlanRow` to the row it contributes to SGLang's per-step synchronisation (one
CPU all-gather); `StepPlan.from_rows` derives the same plan from the gathered rows on every rank.
So F knows how many rows each A rank sends without a further message between the roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from sglang_afd.topology import Topology


class StepKind(IntEnum):
    """What a DP rank does in a step."""

    IDLE = 0
    DECODE = 1
    EXTEND = 2


class PlanRow(NamedTuple):
    """One DP rank's part of the plan, as it travels: int64 values."""

    step_id: int
    kind: int
    rows: int  # rows each of the DP rank's world ranks sends into every MoE layer
    config_hash: int


PLAN_WIDTH = len(PlanRow._fields)


class PlanMismatch(RuntimeError):
    """Ranks disagree on the step they are in or on the configuration they run."""


@dataclass(frozen=True)
class StepPlan:
    """What the world does in one step.

    `rows[r]` is the number of rows that world rank r sends into every MoE layer (0 for F ranks);
    the exchange of a layer happens in `slices` rounds of at most `cap` rows a rank.
    """

    step_id: int
    kinds: tuple[StepKind, ...]
    rows: tuple[int, ...]
    cap: int

    @property
    def slices(self) -> int:
        """Rounds per MoE layer: every rank takes part in each, also with no row to send."""
        return -(-max(self.rows) // self.cap)

    def bounds(self, rank: int, index: int) -> tuple[int, int]:
        """First and one-past-last row that world rank `rank` sends in round `index`."""
        start = min(index * self.cap, self.rows[rank])
        return start, min(start + self.cap, self.rows[rank])

    def counts(self, index: int) -> tuple[int, ...]:
        """Rows that every world rank sends in round `index`."""
        spans = (self.bounds(rank, index) for rank in range(len(self.rows)))
        return tuple(stop - start for start, stop in spans)

    @classmethod
    def from_rows(
        cls,
        gathered: Sequence[Sequence[int]],
        topology: Topology,
        cap: int,
        rank: int,
        own: PlanRow,
    ) -> StepPlan:
        """Derive the plan from the gathered rows, one `PlanRow` per DP rank.

        Args:
            own: what world rank `rank` itself contributed: of a DP rank's world ranks only the
                first one's row is among `gathered`.

        Raises:
            PlanMismatch: this rank's step id or configuration hash is not every DP rank's, its
                rows are not its DP rank's, or an F rank announces rows.
        """
        parts = [PlanRow(*row) for row in gathered]
        name = topology.name_of(rank)
        for dp_rank, part in enumerate(parts):
            peer = topology.name_of(dp_rank * topology.attention_tp)
            if part.config_hash != own.config_hash:
                raise PlanMismatch(
                    f"{name} and {peer} run different configurations (hash "
                    f"{own.config_hash:x} against {part.config_hash:x}); start every command with "
                    f"the same --afd-* flags, model and package versions"
                )
            if part.step_id != own.step_id:
                raise PlanMismatch(
                    f"{name} is in step {own.step_id}, {peer} in step {part.step_id}; the ranks "
                    f"lost step, restart the deployment"
                )
            if part.rows and dp_rank >= topology.attention_ranks:
                raise PlanMismatch(
                    f"{peer} announced {part.rows} rows of its own in step {part.step_id}, but an "
                    f"FFN rank must never hold requests; restart the deployment"
                )
        announced = parts[topology.dp_rank_of(rank)]
        if own.rows != announced.rows:
            raise PlanMismatch(
                f"{name} has {own.rows} rows in step {own.step_id}, but the first rank of its DP "
                f"rank announced {announced.rows}; restart the deployment"
            )
        rows = [0] * topology.world_size
        for world_rank in topology.attention_world:
            rows[world_rank] = parts[topology.dp_rank_of(world_rank)].rows
        return cls(own.step_id, tuple(StepKind(p.kind) for p in parts), tuple(rows), cap)
