"""Which expert each slot of the FFN ranks holds, and which of its slots a row goes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_afd import transports
from sglang_afd.attention.slots import SlotChoice
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.observe.trace import BadTrace, RankTrace, Trace, TracedStep, expert_counts
from sglang_afd.placement import COUNT, MAP, PlacementError, fitting, in_order, read
from sglang_afd.upstream.placement import placement_of
from tests.support.gate_facts import make_facts, refused, write_model

pytestmark = pytest.mark.unit

LAYERS = (1, 3)
FACTS = MoeFacts(LAYERS, num_experts=4, top_k=2, hidden_size=4, intermediate_size=6)


def written(folder: Path, kind: str, rows: Any) -> str:
    file = folder / "placement.json"
    file.write_text(json.dumps({kind: rows}))
    return str(file)


def test_without_a_file_the_first_experts_come_twice() -> None:
    placed = in_order(LAYERS, 4, 2)
    assert placed.layers == dict.fromkeys(LAYERS, (0, 1, 2, 3, 0, 1))
    assert placed.slots_of(3) == [[0, 4], [1, 5], [2], [3]]


def test_a_map_is_taken_as_it_is(tmp_path: Path) -> None:
    rows = [[0] * 6, [3, 3, 2, 1, 0, 0], [0] * 6, [0, 1, 2, 3, 2, 1]]
    placed = read(written(tmp_path, MAP, rows), LAYERS, 4, 2, None)
    assert placed.layers == {1: (3, 3, 2, 1, 0, 0), 3: (0, 1, 2, 3, 2, 1)}


@settings(max_examples=30, deadline=None)
@given(
    owners=st.integers(2, 4),
    more=st.integers(0, 1),
    counts=st.lists(
        st.lists(st.integers(0, 10**6), min_size=8, max_size=8), min_size=4, max_size=4
    ),
)
def test_counts_are_spread_by_sglangs_balancer(
    tmp_path_factory: pytest.TempPathFactory, owners: int, more: int, counts: list[list[int]]
) -> None:
    """Every expert has a slot, and the busiest rank no more to do than it must have."""
    replicas = -8 % owners + more * owners
    facts = MoeFacts(LAYERS, num_experts=8, top_k=2, hidden_size=4, intermediate_size=6)
    file = written(tmp_path_factory.mktemp("counts"), COUNT, [counts, counts])
    config = AfdConfig(
        attention_ranks=1, ffn_ranks=owners, expert_replicas=replicas, expert_placement=file
    )
    placed = placement_of(config, facts)
    for layer in LAYERS:
        assert len(placed.layers[layer]) == 8 + replicas
        assert sorted({*placed.layers[layer]}) == [*range(8)]


def test_the_busiest_expert_is_shared_between_ranks(tmp_path: Path) -> None:
    counts = [[0, 0, 0, 0], [10, 700, 10, 10], [0, 0, 0, 0], [500, 10, 10, 10]]
    config = AfdConfig(
        attention_ranks=1,
        ffn_ranks=2,
        expert_replicas=2,
        expert_placement=written(tmp_path, COUNT, counts),
    )
    placed = placement_of(config, FACTS)
    for layer, busy in ((1, 1), (3, 0)):
        ranks = {slot // 3 for slot in placed.slots_of(layer)[busy]}
        assert ranks == {0, 1}, placed


WRONG = [
    (MAP, [[0, 1, 2, 3]] * 3, "has 3 rows"),
    (MAP, [[0, 1, 2, 3]] * 4, "has 4 numbers, not 6"),
    (MAP, [[0, 1, 2, 2, 1, 0]] * 4, "leaves an expert out"),
    (MAP, [[0, 1, 2, 3, 4, 5]] * 4, "names one that is none"),
    (COUNT, [[5, 5]] * 4, "has 2 numbers, not 4"),
    (COUNT, [["a"] * 4] * 4, "no list of lists of whole numbers"),
    (COUNT, [[-1, 0, 0, 0]] * 4, "no list of lists of whole numbers"),
    (COUNT, 7, "no list of lists"),
    ("other", [], "has neither"),
]


@pytest.mark.parametrize(("kind", "rows", "why"), WRONG)
def test_what_does_not_fit_is_refused(tmp_path: Path, kind: str, rows: Any, why: str) -> None:
    with pytest.raises(PlacementError, match=why):
        read(written(tmp_path, kind, rows), LAYERS, 4, 2, None)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="No such file"):
        read(str(tmp_path / "nowhere"), LAYERS, 4, 2, None)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(PlacementError, match="is no JSON"):
        read(str(tmp_path / "text"), LAYERS, 4, 2, None)


def test_the_gate_looks_at_all_of_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")

    def said(*flags: str) -> list[str]:
        return refused(make_facts(model, "--afd-ffn-ranks", "3", *flags), "topology")

    [text] = said()
    assert "or 2 more --afd-expert-replicas" in text
    assert said("--afd-expert-replicas", "2") == []
    assert any("is more than 32" in text for text in said("--afd-expert-replicas", "35"))
    file = written(tmp_path, MAP, [[0]])
    [text] = said("--afd-expert-replicas", "2", "--afd-expert-placement", file)
    assert "has 1 rows" in text


def test_rows_take_an_experts_slots_in_turn() -> None:
    """Evenly over a batch, and over ranks that have one row each; empty places stay empty."""
    slots = in_order([0], 4, 2).slots_of(0)
    ids = torch.tensor([[0, 3], [0, 1], [0, -1], [1, 0]], dtype=torch.int32)
    chosen = SlotChoice(slots, rank=0, most=3)(ids)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == [[0, 3], [4, 5], [0, -1], [5, 4]]
    choice = SlotChoice(slots, rank=0, most=3)
    choice.use([[0, 2, 5], [1], [3], [4]])
    assert choice(ids).tolist() == [[0, 4], [2, 1], [5, -1], [1, 0]]
    alone = [SlotChoice(slots, rank, most=2)(ids[:1]).tolist()[0][0] for rank in range(4)]
    assert alone == [0, 4, 0, 4]


def test_each_rank_reads_the_experts_of_its_slots() -> None:
    config = AfdConfig(attention_ranks=1, ffn_ranks=2, expert_replicas=2)
    ranks = [RankContext(config, n, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {}) for n in range(3)]
    assert [rank.held(1) for rank in ranks[1:]] == [(0, 1, 2), (3, 0, 1)]
    for expert, readers in enumerate([[1, 2], [1, 2], [1], [2]]):
        name = f"model.layers.3.mlp.experts.{expert}.up_proj.weight"
        assert [rank.rank for rank in ranks if rank.loads_tensor(name)] == readers


def test_transports_know_slots_alone() -> None:
    config = AfdConfig(attention_ranks=1, ffn_ranks=2, expert_replicas=2)
    rank = RankContext(config, 0, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {})
    assert transports._common(rank)["num_experts"] == 6
    plain = AfdConfig(attention_ranks=1, ffn_ranks=2, transport="deepep")
    more = AfdConfig(attention_ranks=1, ffn_ranks=2, transport="deepep", expert_replicas=4)
    held = [transports.estimate(one, FACTS, itemsize=2, fp8=False) for one in (plain, more)]
    assert held[0].ffn.passing < held[1].ffn.passing, "deepep's buffers are by slot"


def step(rows: list[list[int]] | None) -> TracedStep:
    return TracedStep(0, 0, "decode", 1, 1, 0.0, 0.0, 1.0, None, [], rows)


def test_a_trace_tells_what_each_expert_got() -> None:
    """Rows of all its slots, on all ranks, in all steps that were not replayed."""
    first = RankTrace(
        1, "F0", "ffn", [1, 3], 3, [step([[5, 1], [2, 0]]), step(None)], [[0, 1], [2, 0]], 4
    )
    second = RankTrace(2, "F1", "ffn", [1, 3], 3, [step([[7, 4], [9, 0]])], [[2, 0], [1, 2]], 4)
    attention = RankTrace(0, "A0", "attention", [1, 3], 3, [step(None)])
    counts = expert_counts(Trace({}, [attention, first, second]))
    assert counts == [[0, 0, 0], [9, 1, 7], [0, 0, 0], [0, 9, 2]]
    with pytest.raises(BadTrace, match="replayed ones do not"):
        expert_counts(Trace({}, [attention]))
    with pytest.raises(BadTrace, match="2 of 4 slots"):
        expert_counts(Trace({}, [attention, first]))
    with pytest.raises(BadTrace, match="send requests"):
        expert_counts(Trace({}, [RankTrace(2, "F", "ffn", [1], 3, [], [[0]])]))


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (MAP, [[0, 1], 3]),
        (MAP, [[0, 1], None]),
        (MAP, [[0, True]]),
        (MAP, [[0, -1]]),
        (MAP, [[[0, 1]]]),
        (MAP, 5),
        (COUNT, [[[1, 2]], 5]),
        (COUNT, [[[1, 2], [3]], [[1], [2, 3]]]),
        (COUNT, [[[1, 2]], [[1, 2], [3, 4]]]),
        (COUNT, [[1.5, 2]]),
    ],
)
def test_what_is_no_table_is_refused(kind: str, table: Any) -> None:
    with pytest.raises(PlacementError, match=f"{kind} is no list of lists of whole numbers"):
        fitting({kind: table}, "it", [0], 2, 0, None)
