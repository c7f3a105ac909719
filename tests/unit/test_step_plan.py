"""The step plan: the same on all ranks, every row in one round, disagreement refused by name."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_afd.dispatch.step_plan import Caps, Path, PlanMismatch, PlanRow, StepKind, StepPlan
from sglang_afd.topology import Topology

pytestmark = pytest.mark.unit

HASH = 0xABCDEF
THREE = Topology(2, 1)


def gathered(topology: Topology, rows: list[int]) -> list[list[int]]:
    """What the synchronisation gathers when attention DP rank i announces rows[i] rows."""
    parts = [PlanRow(7, StepKind.EXTEND if n else StepKind.IDLE, n, HASH) for n in rows]
    parts += [PlanRow(7, StepKind.IDLE, 0, HASH)] * topology.ffn_ranks
    return [list(part) for part in parts]


EIGHT = Caps(8, None)


def plan_of(topology: Topology, rows: list[int], cap: Caps, rank: int = 0) -> StepPlan:
    return plan_from(gathered(topology, rows), topology, cap, rank)


def plan_from(parts: list[list[int]], topology: Topology, cap: Caps, rank: int) -> StepPlan:
    """The plan of a rank that contributed what its DP rank announced."""
    own = PlanRow(*parts[topology.dp_rank_of(rank)])
    return StepPlan.from_rows(parts, topology, cap, rank, own)


@st.composite
def caps(draw: st.DrawFn) -> Caps:
    return Caps(draw(st.integers(1, 130)), draw(st.one_of(st.none(), st.integers(1, 130))))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    topology = Topology(
        draw(st.integers(1, 5)), draw(st.integers(1, 3)), attention_tp=draw(st.integers(1, 3))
    )
    size = topology.attention_ranks
    return topology, draw(st.lists(st.integers(0, 300), min_size=size, max_size=size))


@given(worlds(), caps())
@example((THREE, [0, 0]), Caps(128, None))
@example((THREE, [128, 0]), Caps(128, None))
@example((THREE, [129, 128]), Caps(128, 512))
def test_rounds_cover_every_row_once_in_order(world: tuple[Topology, list[int]], cap: Caps) -> None:
    topology, rows = world
    plan = plan_of(topology, rows, cap)
    for rank in range(topology.world_size):
        spans = [range(1000)[round_.rows_of(rank)] for round_ in plan.rounds]
        covered = [row for span in spans for row in span]
        announced = rows[topology.dp_rank_of(rank)] if rank in topology.attention_world else 0
        assert covered == list(range(announced))


@given(worlds(), caps())
def test_rounds_keep_to_their_paths_caps(world: tuple[Topology, list[int]], cap: Caps) -> None:
    topology, rows = world
    plan = plan_of(topology, rows, cap)
    assert sorted(plan.rounds, key=lambda round_: round_.path) == list(plan.rounds)
    for round_ in plan.rounds:
        if round_.path is Path.DECODE:
            assert max(round_.counts) <= cap.decode
        else:
            assert cap.bulk is not None and sum(round_.counts) <= cap.bulk
        assert any(round_.counts), "a round in which nobody sends"
        for rank, count in enumerate(round_.counts):
            if count and cap.bulk is not None:
                extends = plan.kinds[rank] is StepKind.EXTEND
                assert extends == (round_.path is Path.BULK)


def test_every_attention_rank_joins_decode_rounds_and_only_senders_join_blocks() -> None:
    topology = Topology(3, 1)
    parts = gathered(topology, [300, 5, 0])
    parts[1][1] = StepKind.DECODE
    rounds = plan_from(parts, topology, Caps(4, 128), 0).rounds
    assert [(round_.path, round_.start, round_.counts) for round_ in rounds] == [
        (Path.DECODE, 0, (0, 4, 0, 0)),
        (Path.DECODE, 4, (0, 1, 0, 0)),
        (Path.BULK, 0, (128, 0, 0, 0)),
        (Path.BULK, 128, (128, 0, 0, 0)),
        (Path.BULK, 256, (44, 0, 0, 0)),
    ]
    for round_ in rounds:
        joining = [rank for rank in topology.attention_world if round_.joins(rank)]
        assert joining == ([0, 1, 2] if round_.path is Path.DECODE else [0])


def test_a_block_takes_as_many_ranks_as_fit_it() -> None:
    topology = Topology(4, 1)
    rounds = plan_of(topology, [60, 30, 50, 120], Caps(4, 100)).rounds
    assert [(round_.start, round_.counts) for round_ in rounds] == [
        (0, (60, 30, 0, 0, 0)),
        (0, (0, 0, 50, 0, 0)),
        (0, (0, 0, 0, 100, 0)),
        (100, (0, 0, 0, 20, 0)),
    ]


@given(worlds(), caps())
def test_all_ranks_derive_the_same_plan(world: tuple[Topology, list[int]], cap: Caps) -> None:
    topology, rows = world
    plans = [plan_of(topology, rows, cap, rank) for rank in range(topology.world_size)]
    assert plans.count(plans[0]) == len(plans)
    assert plans[0].step_id == 7
    assert plans[0].kinds == tuple(
        StepKind.EXTEND if n else StepKind.IDLE
        for n in [*rows, *[0] * topology.ffn_ranks]
        for _ in range(topology.attention_tp)
    )


@given(worlds())
def test_ffn_ranks_send_no_rows(world: tuple[Topology, list[int]]) -> None:
    topology, rows = world
    plan = plan_of(topology, rows, EIGHT)
    assert [plan.rows[rank] for rank in topology.ffn_world] == [0] * len(topology.ffn_world)


def test_a_step_without_rows_has_no_rounds() -> None:
    assert plan_of(THREE, [0, 0], EIGHT).rounds == ()


@pytest.mark.parametrize(
    ("column", "other"), [(0, 8), (3, HASH + 1), (4, 1)], ids=["step", "hash", "lane"]
)
@pytest.mark.parametrize("odd", [0, 1, 2], ids=["A0", "A1", "F0"])
def test_ranks_that_disagree_are_refused_with_both_names(column: int, other: int, odd: int) -> None:
    rows = gathered(THREE, [3, 4])
    rows[odd][column] = other
    own = next(rank for rank in range(3) if rank != odd)
    with pytest.raises(PlanMismatch) as mismatch:
        plan_from(rows, THREE, EIGHT, own)
    message = str(mismatch.value)
    assert message.startswith(THREE.name_of(own))
    assert THREE.name_of(odd) in message
    if column == 0:
        assert "is in step 7" in message and "in step 8" in message
    elif column == 4:
        assert "takes lane 0 in step 7" in message and "lane 1" in message
    else:
        assert f"hash {HASH:x} against {HASH + 1:x}" in message and "--afd-* flags" in message


def test_the_odd_rank_notices_too() -> None:
    rows = gathered(THREE, [3, 4])
    rows[2][3] = HASH + 1
    with pytest.raises(PlanMismatch, match=r"^FFN rank 0 \(world rank 2\) and attention rank 0"):
        plan_from(rows, THREE, EIGHT, rank=2)


def test_a_mismatch_names_the_first_world_rank_of_a_tensor_parallel_peer() -> None:
    topology = Topology(2, 1, attention_tp=2)
    rows = gathered(topology, [3, 4])
    rows[1][0] = 9
    with pytest.raises(
        PlanMismatch, match=r"attention rank 0.1 .* attention rank 1.0 .* in step 9"
    ):
        plan_from(rows, topology, EIGHT, rank=1)


@pytest.mark.parametrize(
    ("column", "other", "said"),
    [
        (0, 8, "is in step 8, attention rank 0.0 (world rank 0) in step 7"),
        (2, 5, "has 5 rows in step 7, but the first rank of its DP rank announced"),
        (3, HASH + 1, "different configurations"),
        (4, 2, "takes lane 2 in step 7, attention rank 0.0 (world rank 0) lane 0"),
    ],
    ids=["step", "rows", "hash", "lane"],
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
        StepPlan.from_rows(rows, topology, EIGHT, rank, PlanRow(*own))
    assert str(mismatch.value).startswith(topology.name_of(rank))
    assert said in str(mismatch.value)


def test_rows_announced_by_an_ffn_rank_are_refused_with_its_name() -> None:
    topology = Topology(2, 2)
    rows = gathered(topology, [3, 4])
    rows[3][2] = 1
    for rank in range(4):
        with pytest.raises(PlanMismatch, match=r"^FFN rank 1 \(world rank 3\) announced 1 rows"):
            plan_from(rows, topology, EIGHT, rank)


def test_the_plan_and_its_rounds_know_their_lane_and_where_there_is_work() -> None:
    parts = [
        list(PlanRow(7, kind, rows, HASH, lane=2, work=work))
        for kind, rows, work in ((StepKind.DECODE, 9, 0b001), (StepKind.EXTEND, 5, 0b100))
    ]
    parts.append(list(PlanRow(7, StepKind.IDLE, 0, HASH, lane=2)))
    plan = plan_from(parts, THREE, Caps(8, 32), 0)
    assert (plan.lane, plan.work) == (2, 0b101)
    assert [(round_.path, round_.lane) for round_ in plan.rounds] == [
        *[(Path.DECODE, 2), (Path.DECODE, 2), (Path.BULK, 2)]
    ]
