"""Plan messages that no well rank sends: refused with a name, at once, and never obeyed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.dispatch.step_plan import (
    MOST_ROWS,
    PLAN_WIDTH,
    Caps,
    PlanMismatch,
    PlanRow,
    StepKind,
    StepPlan,
)
from sglang_afd.topology import Topology

pytestmark = pytest.mark.unit

WORLD = Topology(2, 2)
CAPS = Caps(128, 4096)
GOOD = [
    PlanRow(7, StepKind.DECODE, 3, 0xABC, 1, 0b11),
    PlanRow(7, StepKind.EXTEND, 500, 0xABC, 1, 0b10),
    PlanRow(7, StepKind.IDLE, 0, 0xABC, 1, 0),
    PlanRow(7, StepKind.IDLE, 0, 0xABC, 1, 0),
]
INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 20)


def plan(rows: list[list[int]], rank: int = 2) -> StepPlan:
    """What a well rank, FFN rank 0, makes of the gathered rows."""
    return StepPlan.from_rows(rows, WORLD, CAPS, rank, GOOD[rank])


def test_the_rows_that_the_others_spoil_are_good() -> None:
    assert plan([list(row) for row in GOOD]).rows == (3, 500, 0, 0)


@given(st.integers(0, 3), st.integers(0, PLAN_WIDTH - 1), INT64)
def test_one_value_is_wrong(dp_rank: int, column: int, value: int) -> None:
    """Refused, or it is what that rank may send: its own rows, kind or work, and nothing else."""
    rows = [list(row) for row in GOOD]
    rows[dp_rank][column] = value
    try:
        made = plan(rows)
    except PlanMismatch as mismatch:
        assert rows[dp_rank] != list(GOOD[dp_rank])
        assert WORLD.name_of(dp_rank) in str(mismatch)
        assert "restart" in str(mismatch) or "start every command" in str(mismatch)
        return
    changed = rows[dp_rank] != list(GOOD[dp_rank])
    field = PlanRow._fields[column]
    assert not changed or field == "work" or (field in ("rows", "kind") and dp_rank < 2)
    assert (made.step_id, made.lane) == (7, 1)
    assert all(0 <= count <= MOST_ROWS for count in made.rows)
    assert 0 <= made.work < 16


@given(st.lists(st.lists(INT64, max_size=8), max_size=6))
def test_anything_at_all(rows: list[list[int]]) -> None:
    with pytest.raises(PlanMismatch):
        plan(rows)


@given(st.integers(0, 3), st.integers(1, 10**6))
def test_a_stale_row_is_refused(dp_rank: int, age: int) -> None:
    """Of an earlier step, or of a later one: that rank has lost step, however well its row is."""
    for step_id in (7 - age, 7 + age):
        rows = [list(row) for row in GOOD]
        rows[dp_rank][0] = step_id
        with pytest.raises(PlanMismatch, match=f"in step {step_id}; the ranks lost step"):
            plan(rows, rank=(dp_rank + 1) % 4)


@pytest.mark.parametrize(
    ("dp_rank", "row", "said"),
    [
        (0, GOOD[0]._replace(kind=3), "a step of kind 3"),
        (1, GOOD[1]._replace(kind=-1), "a step of kind -1"),
        (0, GOOD[0]._replace(rows=-1), "-1 rows"),
        (0, GOOD[0]._replace(rows=MOST_ROWS + 1), f"{MOST_ROWS + 1} rows"),
        (0, GOOD[0]._replace(rows=0), "0 rows in a step of kind DECODE"),
        (1, GOOD[1]._replace(kind=0), "500 rows in a step of kind IDLE"),
        (2, GOOD[2]._replace(work=16), "work in lanes 0x10"),
        (3, GOOD[3]._replace(work=-1), "work in lanes -0x1"),
        (3, GOOD[3]._replace(kind=1, rows=1), "1 rows of its own in step 7, but an FFN rank must"),
    ],
)
def test_what_is_wrong_is_named_with_the_rank(dp_rank: int, row: PlanRow, said: str) -> None:
    rows = [list(good) for good in GOOD]
    rows[dp_rank] = list(row)
    with pytest.raises(PlanMismatch) as mismatch:
        plan(rows)
    assert str(mismatch.value).startswith(f"{WORLD.name_of(dp_rank)} announced {said}")


@pytest.mark.parametrize("rows", [[], GOOD[:3], [*GOOD, GOOD[3]], [row[:5] for row in GOOD]])
def test_another_packages_rows_are_refused(rows: list[tuple[int, ...]]) -> None:
    """Another number of ranks, or of values a rank: another version of this package."""
    with pytest.raises(PlanMismatch, match=r"gathered \d rows in step 7 that are not one of 6"):
        plan([list(row) for row in rows])
