"""The step plan: what every rank sends in one step, agreed before any row travels.

Each rank appends a `PlanRow` to the row it contributes to SGLang's per-step synchronisation (one
CPU all-gather); `StepPlan.from_rows` derives the same plan from the gathered rows on every rank.
So F knows how many rows each A rank sends without a further message between the roles.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from sglang_afd.config import MOST_LANES
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
    lane: int = 0  # whose turn the rank is in
    work: int = 0  # lanes in which the rank has requests to decode, a bit each


PLAN_WIDTH = len(PlanRow._fields)
MOST_ROWS = 1 << 24
"""Rows of a rank in one step: more than fit any memory, and few enough to count the rounds of."""


class PlanMismatch(RuntimeError):
    """Ranks disagree on the step they are in or on the configuration they run."""


class Path(IntEnum):
    """How a rank's rows of a step travel."""

    DECODE = 0
    """In rounds of T rows; every rank takes part in every round, also without rows."""
    BULK = 1
    """In blocks of P rows, of ranks that have some: a prefill should read the experts once."""


class Caps(NamedTuple):
    """How many rows a round has, by path."""

    decode: int
    """T: of each rank, at most."""
    bulk: int | None
    """P: of all ranks together, at most, so that F's memory does not grow with their number.
    None: all rows take the decode path."""


class Round(NamedTuple):
    """One exchange of every MoE layer; the same on all ranks."""

    path: Path
    start: int
    """First row of every rank that sends some."""
    counts: tuple[int, ...]
    """Rows that each world rank sends; a transport that graphs are made of (`Transport.graphs`)
    needs none of a decode round."""
    lane: int = 0
    """Whose step it is: rounds of different lanes may be under way at the same time."""

    def rows_of(self, rank: int) -> slice:
        """Which of its rows world rank `rank` sends."""
        return slice(self.start, self.start + self.counts[rank])

    def joins(self, rank: int) -> bool:
        """Whether A rank `rank` takes part."""
        return self.path is Path.DECODE or self.counts[rank] > 0


def recorded(lane: int) -> Round:
    """A lane's decode round as CUDA graphs hold it: how many rows there are is read on the
    device."""
    return Round(Path.DECODE, 0, (), lane)


@dataclass(frozen=True)
class StepPlan:
    """What the world does in one step."""

    step_id: int
    kinds: tuple[StepKind, ...]
    """What each world rank does."""
    rows: tuple[int, ...]
    """Rows that each world rank sends into every MoE layer (CAD: into attention); 0 for ranks that
    serve."""
    caps: Caps
    lane: int = 0
    """Whose turn it is; all ranks take the lanes in one order."""
    work: int = 0
    """Lanes in which any rank had requests to decode when it announced its row, a bit each."""

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The exchanges of every MoE layer, in order: decode first, not to wait for prefills."""
        decode, bulk = (
            [self.rows_of(path, rank) for rank in range(len(self.rows))]
            for path in (Path.DECODE, Path.BULK)
        )
        return (
            *_decode_rounds(decode, self.caps.decode, self.lane),
            *_bulk_rounds(bulk, self.caps.bulk or 1, self.lane),
        )

    def rows_of(self, path: Path, rank: int) -> int:
        """Rows that world rank `rank` sends on that path into every MoE layer."""
        in_blocks = self.kinds[rank] is StepKind.EXTEND and self.caps.bulk is not None
        return self.rows[rank] if in_blocks is (path is Path.BULK) else 0

    def rounds_of(self, path: Path) -> tuple[Round, ...]:
        """The exchanges of one path."""
        return tuple(round_ for round_ in self.rounds if round_.path is path)

    @classmethod
    def from_rows(
        cls,
        gathered: Sequence[Sequence[int]],
        topology: Topology,
        caps: Caps,
        rank: int,
        own: PlanRow,
    ) -> StepPlan:
        """Derive the plan from the gathered rows, one `PlanRow` per DP rank.

        Args:
            own: what world rank `rank` itself contributed: of a DP rank's world ranks only the
                first one's row is among `gathered`.

        Raises:
            PlanMismatch: this rank's step id, lane or configuration hash is not every DP rank's,
                its rows are not its DP rank's, a rank that serves announces rows, or what was
                gathered is not a row of each DP rank, with values that a row can have.
        """
        name = topology.name_of(rank)
        if len(gathered) != topology.dp_size or {len(row) for row in gathered} != {PLAN_WIDTH}:
            raise PlanMismatch(
                f"{name} gathered {len(gathered)} rows in step {own.step_id} that are not one of "
                f"{PLAN_WIDTH} values from each of {topology.dp_size} DP ranks; restart the "
                f"deployment with one version of this package on all hosts"
            )
        parts = [PlanRow(*row) for row in gathered]
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
            if part.lane != own.lane:
                raise PlanMismatch(
                    f"{name} takes lane {own.lane} in step {own.step_id}, {peer} lane {part.lane}; "
                    f"the ranks lost step, restart the deployment"
                )
            if problem := _malformed(part):
                raise PlanMismatch(
                    f"{peer} announced {problem} in step {part.step_id}, which no rank sends; "
                    f"restart the deployment"
                )
            if part.rows and dp_rank >= topology.leading_ranks:
                raise PlanMismatch(
                    f"{peer} announced {part.rows} rows of its own in step {part.step_id}, but an "
                    f"{topology.serving_name} rank must never hold requests; restart the "
                    f"deployment"
                )
        announced = parts[topology.dp_rank_of(rank)]
        if own.rows != announced.rows:
            raise PlanMismatch(
                f"{name} has {own.rows} rows in step {own.step_id}, but the first rank of its DP "
                f"rank announced {announced.rows}; restart the deployment"
            )
        everyone = [parts[topology.dp_rank_of(r)] for r in range(topology.world_size)]
        kinds = tuple(StepKind(part.kind) for part in everyone)
        work = functools.reduce(operator.or_, (part.work for part in parts))
        rows = tuple(part.rows for part in everyone)
        return cls(own.step_id, kinds, rows, caps, own.lane, work)


def _malformed(row: PlanRow) -> str:
    """What a rank cannot have announced, whatever it does; empty if there is nothing."""
    if row.kind not in set(StepKind):
        return f"a step of kind {row.kind}"
    if not 0 <= row.rows <= MOST_ROWS:
        return f"{row.rows} rows"
    if (row.kind == StepKind.IDLE) != (row.rows == 0):
        return f"{row.rows} rows in a step of kind {StepKind(row.kind).name}"
    if not 0 <= row.work < 1 << MOST_LANES:
        return f"work in lanes {row.work:#x}"
    return ""


def _decode_rounds(rows: Sequence[int], cap: int, lane: int) -> Iterator[Round]:
    for start in range(0, max(rows), cap):
        counts = tuple(_part(count, start, cap) for count in rows)
        yield Round(Path.DECODE, start, counts, lane)


def _bulk_rounds(rows: Sequence[int], cap: int, lane: int) -> Iterator[Round]:
    """As many ranks in one block as fit it, in order; their parts begin at the same row."""
    for start in range(0, max(rows), cap):
        counts = [0] * len(rows)
        for rank, count in enumerate(rows):
            part = _part(count, start, cap)
            if sum(counts) + part > cap:
                yield Round(Path.BULK, start, tuple(counts), lane)
                counts = [0] * len(rows)
            counts[rank] = part
        yield Round(Path.BULK, start, tuple(counts), lane)


def _part(count: int, start: int, cap: int) -> int:
    return min(cap, max(0, count - start))
