"""The A side of a layer, over a transport that only records: rounds, order, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_afd.attention.empty_rounds import EmptyRounds
from sglang_afd.attention.exchange import AttentionExchange
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.dispatch.step_plan import Caps, Path, Round, StepKind, StepPlan
from sglang_afd.dispatch.transport import RoutedRows, nothing
from sglang_afd.families import FAMILIES, MoeFacts

pytestmark = pytest.mark.unit

H, K = 4, 2
CAP = 3
CONFIG = AfdConfig(attention_ranks=2, ffn_ranks=1, max_tokens_per_rank=CAP)
FACTS = MoeFacts((0, 1), num_experts=4, top_k=K, hidden_size=H, intermediate_size=8)


class Recorder:
    """Combines to ``2 * hidden + first expert id + first weight`` of what was dispatched."""

    def __init__(self) -> None:
        self.sent: list[RoutedRows] = []
        self.rounds: list[Round] = []
        self.waiting: list[RoutedRows] = []

    def dispatch(
        self, rows: RoutedRows, round_: Round, own_sent: Callable[[], None] = nothing
    ) -> RoutedRows:
        assert not self.waiting, "a round began before the last one was combined"
        self.sent.append(rows)
        self.rounds.append(round_)
        self.waiting.append(rows)
        own_sent()
        return rows

    def combine(self, handle: RoutedRows) -> torch.Tensor:
        assert self.waiting.pop() is handle
        return answer(handle)


def answer(rows: RoutedRows) -> torch.Tensor:
    return 2 * rows.hidden + rows.expert_ids[:, :1] + rows.weights[:, :1]


def make(rank: int = 0, *, serving: bool = True) -> tuple[RankContext, Recorder, AttentionExchange]:
    context = RankContext(CONFIG, rank, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {}, serving)
    transport = Recorder()
    return context, transport, AttentionExchange(context, transport)


def plan(*rows: int, bulk: int | None = None) -> StepPlan:
    """Both A ranks decode, or with `bulk` the first one extends."""
    first = StepKind.DECODE if bulk is None else StepKind.EXTEND
    return StepPlan(11, (first, StepKind.DECODE, StepKind.IDLE), (*rows, 0), Caps(CAP, bulk))


def some_rows(count: int) -> RoutedRows:
    """Rows that all differ, whatever part of them is looked at."""
    places = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    ids = torch.arange(count * K).view(count, K)
    return RoutedRows(places * 100 + torch.arange(H), ids, ids.float() / 1024)


@pytest.mark.parametrize("inside_step", [True, False])
def test_a_warm_up_gives_zeros_and_sends_nothing(inside_step: bool) -> None:
    _, transport, exchange = make(serving=False)
    hidden, ids, weights = some_rows(5)
    hidden = hidden.to(torch.bfloat16)
    if inside_step:
        with exchange.step():
            output = exchange(hidden, ids, weights)
    else:
        output = exchange(hidden, ids, weights)
    assert output.shape == hidden.shape and output.dtype == hidden.dtype
    assert not output.any()
    assert transport.sent == []


@given(st.integers(0, 20), st.integers(1, 20), st.sampled_from([0, 1]))
@example(0, 1, 0)
@example(CAP, CAP + 1, 0)
def test_rounds_send_all_rows_in_order_and_join_their_results(
    own: int, other: int, rank: int
) -> None:
    context, transport, exchange = make(rank)
    context.plan = plan(own, other) if rank == 0 else plan(other, own)
    rows = some_rows(own)
    with exchange.step():
        outputs = [exchange(*rows) for _ in FACTS.layers]
    rounds = -(-max(own, other) // CAP)
    assert len(transport.sent) == len(FACTS.layers) * rounds  # also those without own rows
    for layer, output in enumerate(outputs):
        sent = transport.sent[layer * rounds : (layer + 1) * rounds]
        assert all(part.hidden.shape[0] <= CAP for part in sent)
        for whole, parts in zip(rows, zip(*sent, strict=True), strict=True):
            assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(output, answer(rows))


@pytest.mark.parametrize("count", [0, 4, 6])
def test_other_rows_than_announced_are_refused_and_not_sent(count: int) -> None:
    context, transport, exchange = make(1)
    context.plan = plan(4, 5)
    with pytest.raises(RuntimeError) as refusal, exchange.step():
        exchange(*some_rows(count))
    assert "attention rank 1 (world rank 1) announced 5 rows for step 11" in str(refusal.value)
    assert str(refusal.value).endswith(f"got {count}")
    assert transport.sent == []


@pytest.mark.parametrize("run", [0, 1])
def test_a_forward_that_leaves_out_layers_is_refused(run: int) -> None:
    context, _, exchange = make()
    context.plan = plan(2, 0)
    with pytest.raises(RuntimeError) as refusal, exchange.step():
        for _ in range(run):
            exchange(*some_rows(2))
    message = str(refusal.value)
    assert f"attention rank 0 (world rank 0) left out {2 - run} of 2 MoE layers" in message
    assert "step 11" in message


def test_a_surplus_layer_is_refused_and_not_sent() -> None:
    context, transport, exchange = make()
    context.plan = plan(2, 0)
    with (
        pytest.raises(RuntimeError, match="more than 2 MoE layers in step 11"),
        exchange.step(),
    ):
        for _ in range(3):
            exchange(*some_rows(2))
    assert len(transport.sent) == 2


def test_a_step_without_rows_sends_nothing() -> None:
    context, transport, exchange = make()
    context.plan = plan(0, 0)
    with exchange.step():
        outputs = [exchange(*some_rows(0)) for _ in FACTS.layers]
    assert [output.shape for output in outputs] == [(0, H)] * 2
    assert transport.sent == []


@pytest.mark.parametrize(("rank", "paths"), [(0, ["DECODE", "BULK", "BULK"]), (1, ["DECODE"])])
def test_a_decoding_rank_takes_no_part_in_a_prefills_blocks(rank: int, paths: list[str]) -> None:
    """The prefill's rank sends blocks, and joins the decoding one's round without rows."""
    context, transport, exchange = make(rank)
    context.plan = plan(14, 2, bulk=8)
    rows = some_rows((14, 2)[rank])
    with exchange.step():
        outputs = [exchange(*rows) for _ in FACTS.layers]
    assert [Path(round_.path).name for round_ in transport.rounds] == paths * 2
    assert [part.hidden.shape[0] for part in transport.sent] == [[0, 8, 6], [2]][rank] * 2
    assert all(torch.equal(output, answer(rows)) for output in outputs)


class CountedRounds:
    """Stands in for the graph of rounds without rows: what was started, and when it was awaited."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def start(self, rounds: int) -> None:
        self.calls.append(("start", rounds))

    def finish(self) -> None:
        self.calls.append(("finish", 0))


def with_graphs(rank: int) -> tuple[RankContext, Recorder, AttentionExchange, CountedRounds]:
    context, transport, exchange = make(rank)
    empty = CountedRounds()
    exchange.use([cast(EmptyRounds, empty)])
    return context, transport, exchange, empty


def test_with_graphs_a_prefill_goes_through_its_blocks_alone() -> None:
    """The decode rounds of the other rank, two of 3 rows each, go their own way meanwhile."""
    context, transport, exchange, empty = with_graphs(0)
    context.plan = plan(14, 5, bulk=8)
    rows = some_rows(14)
    with exchange.step():
        assert empty.calls == [("start", 2)]
        outputs = [exchange(*rows) for _ in FACTS.layers]
        assert len(empty.calls) == 1
    assert empty.calls[1:] == [("finish", 0)]
    assert [round_.path for round_ in transport.rounds] == [Path.BULK, Path.BULK] * 2
    assert all(torch.equal(output, answer(rows)) for output in outputs)


@pytest.mark.parametrize(("rows", "rounds"), [((2, 0), 1), ((7, 0), 3), ((0, 0), 0)])
def test_with_graphs_a_rank_without_rows_needs_no_forward(
    rows: tuple[int, int], rounds: int
) -> None:
    context, transport, exchange, empty = with_graphs(1)
    context.plan = plan(*rows)
    assert exchange.skips()
    assert empty.calls == ([("start", rounds), ("finish", 0)] if rounds else [])
    assert transport.sent == [] and context.plan is None


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_lanes_rounds_without_rows_are_its_own(lane: int) -> None:
    """Lane 2 is that of prefills, where nobody decodes."""
    context, _, exchange = make(1)
    empty = [CountedRounds(), CountedRounds()]
    exchange.use([cast(EmptyRounds, of_lane) for of_lane in empty])
    kind = StepKind.DECODE if lane < 2 else StepKind.EXTEND
    context.plan = StepPlan(11, (kind, StepKind.IDLE), (2, 0), Caps(CAP, 8), lane)
    assert exchange.skips()
    assert [len(of_lane.calls) for of_lane in empty] == [2 * (i == lane) for i in range(2)]


def test_recorded_work_between_exchanges_lies_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn begins with what came back and ends when rows are sent; what is before the first
    exchange and behind the last has none, so that turns are whole in every graph."""
    _, transport, exchange = make(serving=False)
    calls: list[str] = []

    class Recorded:
        def take(self) -> None:
            calls.append("take")

        def end(self) -> None:
            calls.append("end")

    for name in ("dispatch", "combine"):
        original = getattr(transport, name)
        monkeypatch.setattr(
            transport, name, lambda *a, o=original, n=name: (calls.append(n), o(*a))[1]
        )
    exchange.take_turns(Recorded())
    for _ in range(2):  # buckets
        for _ in FACTS.layers:
            exchange._recorded(*some_rows(2))
        assert calls == ["dispatch", "combine", "take", "dispatch", "end", "combine"]
        calls.clear()


def test_a_rank_with_rows_or_without_graphs_needs_its_forward() -> None:
    context, _, exchange, empty = with_graphs(0)
    assert not exchange.skips()  # no step is agreed
    context.plan = plan(2, 0)
    assert not exchange.skips()
    with exchange.step():
        outputs = [exchange(*some_rows(2)) for _ in FACTS.layers]
    assert len(outputs) == 2 and empty.calls == []
    context, _, exchange = make(1)
    context.plan = plan(2, 0)
    assert not exchange.skips() and context.plan is not None


def test_a_replayed_forward_has_gone_through_all_layers() -> None:
    context, transport, exchange, _ = with_graphs(0)
    context.plan = plan(2, CAP)
    with exchange.step():
        exchange.replayed()
    assert transport.sent == []


def test_a_replay_where_the_plan_has_more_rounds_is_refused() -> None:
    context, _, exchange, _ = with_graphs(0)
    context.plan = plan(2, CAP + 1)
    with (
        pytest.raises(RuntimeError, match="one round, but step 11 has 2; F ranks still wait"),
        exchange.step(),
    ):
        exchange.replayed()


def test_a_failed_forward_fails_with_its_own_error_and_ends_the_step() -> None:
    context, transport, exchange = make()
    context.plan = plan(2, 0)
    with pytest.raises(KeyError), exchange.step():
        exchange(*some_rows(2))
        raise KeyError
    sent = len(transport.sent)
    with pytest.raises(RuntimeError, match="outside of an agreed step"):
        exchange(*some_rows(2))
    assert len(transport.sent) == sent


def test_every_step_counts_its_own_layers() -> None:
    context, transport, exchange = make()
    for _ in range(3):
        context.plan = plan(2, 0)
        with exchange.step():
            for _ in FACTS.layers:
                exchange(*some_rows(2))
    assert len(transport.sent) == 3 * len(FACTS.layers)


def test_a_forward_without_an_agreed_step_is_refused() -> None:
    _, transport, exchange = make()
    with pytest.raises(RuntimeError, match="outside of an agreed step"), exchange.step():
        exchange(*some_rows(1))
    assert transport.sent == []
