"""Layouts: every rank has one role, every expert one owner, and what cannot be right is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.topology import Role, Topology, TopologyError

pytestmark = pytest.mark.unit

layouts = st.builds(Topology, st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))


@given(layouts)
def test_attention_ranks_come_first_and_all_ranks_have_one_role(layout: Topology) -> None:
    roles = [layout.role_of(rank) for rank in range(layout.world_size)]
    attention = layout.attention_ranks * layout.attention_tp
    assert roles == [Role.ATTENTION] * attention + [Role.FFN] * layout.ffn_ranks * (
        layout.attention_tp
    )
    assert [*layout.attention_world, *layout.ffn_world] == list(range(layout.world_size))


@given(layouts)
def test_a_dp_rank_is_attention_tp_neighbours_of_one_role(layout: Topology) -> None:
    groups: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        groups.setdefault(layout.dp_rank_of(rank), []).append(rank)
    assert list(groups) == list(range(layout.dp_size))
    for ranks in groups.values():
        assert ranks == list(range(ranks[0], ranks[0] + layout.attention_tp))
        assert len({layout.role_of(rank) for rank in ranks}) == 1


@given(layouts, st.integers(1, 40))
def test_every_expert_has_one_owner(layout: Topology, per_rank: int) -> None:
    experts = per_rank * layout.ffn_ranks * layout.attention_tp
    owned = [layout.experts_of(rank, experts) for rank in layout.ffn_world]
    assert [expert for slice_ in owned for expert in slice_] == list(range(experts))
    assert {len(slice_) for slice_ in owned} == {layout.experts_per_rank(experts)} == {per_rank}


def test_uneven_experts_are_refused_with_the_counts_that_fit() -> None:
    with pytest.raises(TopologyError) as refusal:
        Topology(1, 3, 2).experts_per_rank(16)
    message = str(refusal.value)
    assert "16 experts do not divide over 6 FFN ranks" in message
    assert "--afd-ffn-ranks 3 x --afd-attention-tp 2" in message
    assert "choose a product out of 1, 2, 4, 8, 16, or 2 more --afd-expert-replicas" in message


@given(layouts)
def test_attention_ranks_own_no_experts(layout: Topology) -> None:
    experts = layout.ffn_ranks * layout.attention_tp
    for rank in layout.attention_world:
        name = re.escape(layout.name_of(rank))
        with pytest.raises(TopologyError, match=f"^{name} owns no experts"):
            layout.experts_of(rank, experts)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("flag", ["attention-ranks", "ffn-ranks", "attention-tp"])
def test_counts_below_one_are_refused_by_flag(flag: str, value: int) -> None:
    counts = {"attention_ranks": 1, "ffn_ranks": 1, flag.replace("-", "_"): value}
    with pytest.raises(TopologyError, match=f"--afd-{flag} is {value}; .*at least 1"):
        Topology(**counts)


@pytest.mark.parametrize("rank", [-1, 3])
@pytest.mark.parametrize("ask", ["role_of", "name_of", "experts_of"])
def test_ranks_outside_of_the_world_are_refused(ask: str, rank: int) -> None:
    more = (4,) if ask == "experts_of" else ()
    with pytest.raises(TopologyError, match=re.escape(f"rank {rank} is outside")):
        getattr(Topology(2, 1), ask)(rank, *more)


def test_names_count_dp_ranks_from_zero_in_each_role() -> None:
    layout = Topology(2, 2)
    assert [layout.name_of(rank) for rank in range(4)] == [
        "attention rank 0 (world rank 0)",
        "attention rank 1 (world rank 1)",
        "FFN rank 0 (world rank 2)",
        "FFN rank 1 (world rank 3)",
    ]


def test_with_attention_tp_names_say_the_place_in_the_dp_rank() -> None:
    layout = Topology(2, 1, attention_tp=2)
    assert [layout.name_of(rank) for rank in range(6)] == [
        "attention rank 0.0 (world rank 0)",
        "attention rank 0.1 (world rank 1)",
        "attention rank 1.0 (world rank 2)",
        "attention rank 1.1 (world rank 3)",
        "FFN rank 0.0 (world rank 4)",
        "FFN rank 0.1 (world rank 5)",
    ]
