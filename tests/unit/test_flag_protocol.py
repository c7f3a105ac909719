"""The flag protocol of the exchange, searched through at small sizes; and what must not be changed.

Every negative control breaks one of the assumptions that docs/kernels.md lists, and must be found.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.flag_model import Found, Model, search

pytestmark = pytest.mark.unit

SIZES = [(1, 1, 1, 3), (2, 1, 1, 3), (1, 2, 1, 3), (2, 2, 1, 2), (1, 1, 2, 3), (1, 1, 3, 2)]
LARGER = [(2, 2, 1, 3), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 3, 3)]


@pytest.mark.parametrize(
    "sizes", [*SIZES, *(pytest.param(sizes, marks=pytest.mark.full) for sizes in LARGER)]
)
def test_every_order_ends_without_a_fault(sizes: tuple[int, int, int, int]) -> None:
    outcome = search(Model(*sizes))
    assert outcome.found is None
    assert outcome.states > 80  # the search went somewhere


def fault(model: Model) -> str:
    """What the search finds; fails if it finds nothing."""
    found = search(model).found
    assert found is not None, f"nothing found in {model}"
    print(*found.steps, sep="\n")
    return found.fault


@pytest.mark.parametrize("lanes", [2, 3])
def test_waits_that_fill_the_gpu_deadlock(lanes: int) -> None:
    """A grid of spinning blocks: A inside one lane's wait, F inside another's."""
    model = Model(1, 1, lanes, 1)
    assert fault(dataclasses.replace(model, wait_slots=model.slots)) == "deadlock"


def test_waits_that_fill_the_gpu_are_harmless_with_one_lane() -> None:
    model = Model(1, 1, 1, 3)
    assert search(dataclasses.replace(model, wait_slots=model.slots)).found is None


def test_waits_that_leave_too_little_deadlock() -> None:
    """Half the room that is left for the waits of all lanes, for each."""
    assert fault(Model(1, 1, 2, 1, wait_slots=3)) == "deadlock"


def test_a_rank_that_does_not_wait_for_all_ffn_ranks_overwrites_rows() -> None:
    """One that returns nothing to it may still be reading what it sent last."""
    assert fault(Model(1, 2, 1, 2, awaited=1)) == "overwritten"


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1)])
def test_flags_ahead_of_their_rows_let_stale_rows_be_read(sizes: tuple[int, int, int, int]) -> None:
    assert fault(Model(*sizes, released=False)) == "stale read"


def test_lanes_that_share_a_buffer_overwrite_each_other() -> None:
    assert fault(Model(1, 1, 2, 1, shared=True)) == "overwritten"


def test_one_launch_queue_and_other_orders_on_the_two_roles_deadlock() -> None:
    """What waits in a stream holds up the streams that share its launch queue."""
    assert fault(Model(1, 1, 2, 1, queues=1, order_a=(0, 1), order_f=(1, 0))) == "deadlock"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_launch_queue_will_do_where_both_roles_keep_one_order(order: tuple[int, int]) -> None:
    assert search(Model(1, 1, 2, 2, queues=1, order_a=order, order_f=order)).found is None


def test_launch_queues_for_all_lanes_make_their_order_free() -> None:
    assert search(Model(1, 1, 2, 2, queues=2, order_a=(0, 1), order_f=(1, 0))).found is None


def test_a_third_lane_in_the_queue_of_another_deadlocks() -> None:
    """Two queues for three lanes: lanes 0 and 2 share one."""
    model = Model(1, 1, 3, 1, queues=2, order_a=(0, 1, 2), order_f=(2, 1, 0))
    assert fault(model) == "deadlock"


@pytest.mark.parametrize("missing", [0, 1])
def test_an_exchange_left_out_without_a_word_deadlocks(missing: int) -> None:
    """So decode takes all A ranks, also those without rows."""
    assert fault(Model(2, 1, 1, 2, absent=frozenset({(1, missing)}), told=False)) == "deadlock"


@pytest.mark.parametrize("missing", [{(1, 0)}, {(0, 0), (1, 1)}])
def test_an_exchange_may_be_left_out_if_the_ffn_ranks_know(missing: set[tuple[int, int]]) -> None:
    """The block path, where the plan names the sources with rows."""
    assert search(Model(2, 1, 1, 3, absent=frozenset(missing))).found is None


def test_a_fault_comes_with_the_shortest_way_to_it() -> None:
    found = search(Model(1, 1, 1, 1, released=False)).found
    assert found == Found(
        "stale read",
        [
            "lane 0: A0 send",
            "lane 0: flag of row A0>F0",
            "lane 0: F0 wait",
            "lane 0: F0 seen",
            "lane 0: F0 experts",
        ],
    )
