"""Requests reach attention ranks only, and one that names another rank is refused, not fatal."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_afd.config import AfdConfig
from sglang_afd.upstream.hooks import Hook
from sglang_afd.upstream.routing import hooks

pytestmark = pytest.mark.unit

A2F1 = AfdConfig(attention_ranks=2, ffn_ranks=1)
HOOKS = {hook.target.rpartition(".")[2]: hook for hook in hooks(A2F1)}


class Controller:
    """The parts of SGLang's controller that the hooks touch, with its three DP ranks."""

    def __init__(self) -> None:
        self.status = [True] * 3
        self.workers = ["w0", "w1", "w2"]
        self.active = [0, 1, 2]

    def _refresh_active_workers(self) -> None:
        self.active = [rank for rank, active in enumerate(self.status) if active]


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"rid": "r", "routed_dp_rank": None, **fields})


def hook(name: str) -> Hook:
    return HOOKS[name]


@pytest.mark.parametrize("spelling", ["routed_dp_rank", "data_parallel_rank"])
@pytest.mark.parametrize("rank", [2, 3, 99, -1, -3])
def test_a_request_that_names_no_attention_rank_is_refused(spelling: str, rank: int) -> None:
    with pytest.raises(ValueError, match=f"DP rank {rank} takes no requests: .* 0 to 1") as error:
        hook("generate_request").fn(None, request(**{spelling: rank}), None)
    assert ("run experts" in str(error.value)) == (rank == 2)


@pytest.mark.parametrize("spelling", ["routed_dp_rank", "data_parallel_rank"])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_request_for_an_attention_rank_passes(spelling: str, rank: int | None) -> None:
    assert hook("generate_request").fn(None, request(**{spelling: rank})) is None


def test_of_two_spellings_the_one_that_sglang_takes_counts() -> None:
    hook("generate_request").fn(None, request(routed_dp_rank=1, data_parallel_rank=2))
    with pytest.raises(ValueError, match="DP rank 2"):
        hook("generate_request").fn(None, request(routed_dp_rank=2, data_parallel_rank=1))


def test_a_request_without_the_field_passes() -> None:
    assert hook("generate_request").fn(None, SimpleNamespace()) is None


@pytest.mark.parametrize("rank", [2, 99, -1])
def test_the_controller_balances_what_it_cannot_route(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    def original(controller: Any, asked: Any) -> bool:
        assert asked.routed_dp_rank is None, "SGLang raises here, and the server ends"
        return False

    with caplog.at_level(logging.ERROR):
        assert not hook("maybe_external_dp_rank_routing").fn(
            original, Controller(), request(routed_dp_rank=rank)
        )
    assert f"names DP rank {rank}" in caplog.text


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_controller_routes_to_attention_ranks(rank: int | None) -> None:
    routed = hook("maybe_external_dp_rank_routing").fn(
        lambda _, asked: asked.routed_dp_rank, Controller(), request(routed_dp_rank=rank)
    )
    assert routed == rank


@pytest.mark.parametrize("name", ["launch_dp_attention_schedulers", "update_active_ranks"])
def test_ffn_ranks_are_never_active(name: str) -> None:
    controller = Controller()
    hook(name).fn(None, controller, "whatever", kept="whatever")
    assert controller.active == [0, 1]


def test_balancing_sees_the_loads_of_attention_ranks_alone() -> None:
    budget = SimpleNamespace(total_requests=[5, 4, 0], total_tokens=[50, 40, 7], num_dp_ranks=3)

    def dispatch(seen: Any, method: str) -> int:
        assert (seen.total_requests, seen.total_tokens) == ([5, 4], [50, 40])
        assert seen.num_dp_ranks == 2 and method == "tokens"
        target = seen.total_requests.index(min(seen.total_requests))
        seen.total_requests[target] += 1
        return target

    assert hook("dispatch").fn(dispatch, budget, "tokens") == 1
    assert budget.total_requests == [5, 5, 0]
    assert budget.total_tokens == [50, 40, 7] and budget.num_dp_ranks == 3


def test_a_budget_is_whole_again_after_an_error() -> None:
    budget = SimpleNamespace(total_requests=[5, 4, 0], total_tokens=[1, 2, 3], num_dp_ranks=3)
    with pytest.raises(ZeroDivisionError):
        hook("dispatch").fn(lambda _: 1 // 0, budget)
    assert budget == SimpleNamespace(
        total_requests=[5, 4, 0], total_tokens=[1, 2, 3], num_dp_ranks=3
    )


def test_rooms_are_spread_over_attention_ranks() -> None:
    controller = Controller()
    seen = hook("follow_bootstrap_room_scheduler").fn(
        lambda c, room: c.workers[room % len(c.workers)], controller, 2
    )
    assert seen == "w0"
    assert controller.workers == ["w0", "w1", "w2"]
