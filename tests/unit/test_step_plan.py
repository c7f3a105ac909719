"""The step plan: the same on all ranks, every row in one round, disagreement refused by name."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_afd.dispatch.step_plan import PlanMismatch, PlanRow, StepKind, StepPlan
from sglang_afd.topology import Topology

pytestmark = pytest.mark.unit

HASH = 0xABCDEF
THREE = Topology(2, 1)


def gathered(topology: Topology, rows: list[int]) -> list[list[int]]:
    """What the synchronisation gathers when attention DP rank i announces rows[i] rows."""
    parts = [PlanRow(7, StepKind.EXTEND if n else StepKind.IDLE, n, HASH) for n in rows]
    parts += [PlanRow(7, StepKind.IDLE, 0, HASH)] * topology.ffn_ranks
    return [list(part) for part in parts]


def plan_of(topology: Topology, rows: list[int], cap: int, rank: int = 0) -> StepPlan:
    return plan_from(gathered(topology, rows), topology, cap, rank)


def plan_from(parts: list[list[int]], topology: Topology, cap: int, rank: int) -> StepPlan:
    """The plan of a rank that contributed what its DP rank announced."""
    own = PlanRow(*parts[topology.dp_rank_of(rank)])
    return StepPlan.from_rows(parts, topology, cap, rank, own)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    topology = Topology(
        draw(st.integers(1, 5)), draw(st.integers(1, 3)), attention_tp=draw(st.integers(1, 3))
    )
    size = topology.attention_ranks
    return topology, draw(st.lists(st.integers(0, 300), min_size=size, max_size=size))


@given(worlds(), st.integers(1, 130))
@example((THREE, [0, 0]), 128)
@example((THREE, [128, 0]), 128)
@example((THREE, [129, 128]), 128)
def test_rounds_cover_every_row_once_in_order(world: tuple[Topology, list[int]], cap: int) -> None:
    topology, rows = world
    plan = plan_of(topology, rows, cap)
    for rank in range(topology.world_size):
        spans = [plan.bounds(rank, index) for index in range(plan.slices)]
        covered = [row for start, stop in spans for row in range(start, stop)]
        announced = rows[topology.dp_rank_of(rank)] if rank in topology.attention_world else 0
        assert covered == list(range(announced))


@given(worlds(), st.integers(1, 130))
def test_counts_are_the_rounds_sizes_within_the_cap(
    world: tuple[Topology, list[int]], cap: int
) -> None:
    topology, rows = world
    plan = plan_of(topology, rows, cap)
    rounds = [plan.counts(index) for index in range(plan.slices)]
    assert all(0 <= count <= cap for counts in rounds for count in counts)
    assert all(any(counts) for counts in rounds), "a round in which nobody sends"
    totals = [sum(counts[rank] for counts in rounds) for rank in range(topology.world_size)]
    assert tuple(totals) == plan.rows
    assert sum(totals) == sum(rows) * topology.attention_tp
    for index, counts in enumerate(rounds):
        for rank, count in enumerate(counts):
            start, stop = plan.bounds(rank, index)
            assert count == stop - start


@given(worlds(), st.integers(1, 130))
def test_all_ranks_derive_the_same_plan(world: tuple[Topology, list[int]], cap: int) -> None:
    topology, rows = world
    plans = [plan_of(topology, rows, cap, rank) for rank in range(topology.world_size)]
    assert plans.count(plans[0]) == len(plans)
    assert plans[0].step_id == 7
    assert plans[0].kinds[: len(rows)] == tuple(
        StepKind.EXTEND if n else StepKind.IDLE for n in rows
    )


@given(worlds())
def test_ffn_ranks_send_no_rows(world: tuple[Topology, list[int]]) -> None:
    topology, rows = world
    plan = plan_of(topology, rows, 16)
    assert [plan.rows[rank] for rank in topology.ffn_world] == [0] * len(topology.ffn_world)


def test_a_step_without_rows_has_no_rounds() -> None:
    assert plan_of(THREE, [0, 0], 8).slices == 0


@pytest.mark.parametrize(("column", "other"), [(0, 8), (3, HASH + 1)], ids=["step", "hash"])
@pytest.mark.parametrize("odd", [0, 1, 2], ids=["A0", "A1", "F0"])
def test_ranks_that_disagree_are_refused_with_both_names(column: int, other: int, odd: int) -> None:
    rows = gathered(THREE, [3, 4])
    rows[odd][column] = other
    own = next(rank for rank in range(3) if rank != odd)
    with pytest.raises(PlanMismatch) as mismatch:
        plan_from(rows, THREE, 8, own)
    message = str(mismatch.value)
    assert message.startswith(THREE.name_of(own))
    assert THREE.name_of(odd) in message
    if column == 0:
        assert "is in step 7" in message and "in step 8" in message
    else:
        assert f"hash {HASH:x} against {HASH + 1:x}" in message and "--afd-* flags" in message


def test_the_odd_rank_notices_too() -> None:
    rows = gathered(THREE, [3, 4])
    rows[2][3] = HASH + 1
    with pytest.raises(PlanMismatch, match=r"^FFN rank 0 \(world rank 2\) and attention rank 0"):
        plan_from(rows, THREE, 8, rank=2)


def test_a_mismatch_names_the_first_world_rank_of_a_tensor_parallel_peer() -> None:
    topology = Topology(2, 1, attention_tp=2)
    rows = gathered(topology, [3, 4])
    rows[1][0] = 9
    with pytest.raises(
        PlanMismatch, match=r"attention rank 0.1 .* attention rank 1.0 .* in step 9"
    ):
        plan_from(rows, topology, 8, rank=1)


@pytest.mark.parametrize(
    ("column", "other", "said"),
    [
        (0, 8, "is in step 8, attention rank 0.0 (world rank 0) in step 7"),
        (2, 5, "has 5 rows in step 7, but the first rank of its DP rank announced"),
        (3, HASH + 1, "different configurations"),
    ],
    ids=["step", "rows", "hash"],
)
@pytest.mark.parametrize("rank", [3, 5], ids=["attention", "ffn"])
def test_a_rank_whose_row_is_not_gathered_compares_its_own(
    rank: int, column: int, other: int, said: str
) -> None:
    """Only the first world rank's row of each DP rank is gathered."""
    topology = Topology(2, 1, attention_tp=2)
    rows = gathered(topology, [3, 4])
    own = list(rows[topology.dp_rank_of(rank)])
    own[column] = other
    with pytest.raises(PlanMismatch) as mismatch:
        StepPlan.from_rows(rows, topology, 8, rank, PlanRow(*own))
    assert str(mismatch.value).startswith(topology.name_of(rank))
    assert said in str(mismatch.value)


def test_rows_announced_by_an_ffn_rank_are_refused_with_its_name() -> None:
    topology = Topology(2, 2)
    rows = gathered(topology, [3, 4])
    rows[3][2] = 1
    for rank in range(4):
        with pytest.raises(PlanMismatch, match=r"^FFN rank 1 \(world rank 3\) announced 1 rows"):
            plan_from(rows, topology, 8, rank)
