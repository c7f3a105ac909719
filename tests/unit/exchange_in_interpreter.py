"""The exchange kernels in Triton's interpreter on the CPU, against their reference, bit for bit.

Triton decides when it is imported whether kernels are interpreted, for the whole process.  So
pytest does not collect this file by itself: test_exchange_kernels.py runs it in a process of its
own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from sglang_afd.dispatch import drawn, draws
from sglang_afd.dispatch.channel import Shape, Span, layouts
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.emulation import Emulation
from sglang_afd.kernels import drawn as drawn_kernels
from sglang_afd.kernels import exchange as kernels
from sglang_afd.kernels import exchange_reference as reference
from sglang_afd.kernels import flags
from sglang_afd.kernels.stamps import INTERPRETED, new_stamps
from sglang_afd.observe.stages import Stage
from sglang_afd.observe.stamps import GraphStamps
from sglang_afd.topology import Role, Topology
from tests.support.emulated import exchange_of_sources
from tests.support.local_ends import (
    Ends,
    expected,
    make_ends,
    make_transports,
    random_rows,
    run_experts,
)

pytestmark = pytest.mark.unit

BF16, FP32 = torch.bfloat16, torch.float32
MARGIN = 256  # bytes
SLOW = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def convert_as_hardware_does(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter of Triton 3.8 rounds halves up and can lose the carry into the exponent."""
    assert INTERPRETED, "needs TRITON_INTERPRET=1 before Triton is imported"

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        bits = torch.from_numpy(values.copy())
        if target == interpreter.tl.bfloat16:
            rounded = bits.view(torch.float32).bfloat16().view(torch.int16)
            return rounded.numpy().view(np.uint16)
        return bits.view(torch.int16).view(torch.bfloat16).float().numpy().view(np.uint32)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    yield


class Sizes(NamedTuple):
    """A channel, and how its kernels cut up the work."""

    attention: int
    ffn: int
    per_rank: int
    shape: Shape
    blocks: int
    """Blocks of a kernel: with fewer than rows, a block moves several."""
    block_size: int
    """Elements that a block moves at a time."""

    @property
    def experts(self) -> int:
        return self.ffn * self.per_rank


class Exchange(NamedTuple):
    """What the A ranks send."""

    counts: list[int]
    skew: str
    """even, one (all rows to one expert), none (no row to any)."""
    seed: int


sizes = st.builds(
    Sizes,
    attention=st.integers(1, 3),
    ffn=st.integers(1, 3),
    per_rank=st.integers(1, 6),
    shape=st.builds(
        Shape,
        cap=st.integers(1, 3),
        hidden_size=st.integers(1, 8).map(lambda n: 16 * n),
        top_k=st.integers(1, 16),
        dtype=st.sampled_from([BF16, FP32]),
    ),
    blocks=st.integers(1, 5),
    block_size=st.sampled_from([16, 64, 2048]),
)


@st.composite
def exchanges(draw: st.DrawFn, at: Sizes, most: int) -> list[Exchange]:
    """One exchange to `most` of them; ranks often have no row, or as many as they may."""
    cap = at.shape.cap
    counts = st.lists(
        st.sampled_from([0, cap]) | st.integers(0, cap),
        min_size=at.attention,
        max_size=at.attention,
    )
    one = st.builds(
        Exchange, counts, st.sampled_from(["even", "even", "one", "none"]), st.integers(0, 2**30)
    )
    return draw(st.lists(one, min_size=1, max_size=most))


def make(at: Sizes, patch: pytest.MonkeyPatch) -> Ends:
    """The channel's ends; what no one has written yet is not a number, or the id of an expert.

    Before and after the channel lie bytes that `exchange` expects as they are.
    """
    patch.setattr(kernels, "MAX_BLOCK", at.block_size)
    world = Topology(at.attention, at.ffn)
    ends = make_ends(world, at.experts, at.shape, offset=MARGIN, blocks=at.blocks)
    for rank, memory in enumerate(ends.memory):
        memory[:MARGIN] = memory[-MARGIN:] = 99
        layout = layouts(ends.topology, at.shape)[rank in ends.topology.ffn_world]
        layout.rows.of(memory[MARGIN:]).fill_(torch.nan)
        layout.weights.of(memory[MARGIN:]).fill_(torch.nan)
    return ends


def routed(at: Sizes, sent: Exchange, ids_type: torch.dtype) -> list[RoutedRows]:
    """The rows of every A rank."""
    generator = torch.Generator().manual_seed(sent.seed)
    rows = []
    for count in sent.counts:
        ids = torch.randint(at.experts, (count, at.shape.top_k), generator=generator)
        if sent.skew == "one":
            ids[:] = sent.seed % at.experts
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
        if sent.skew == "none":
            ids[:] = -1
        hidden = torch.randn(count, at.shape.hidden_size, generator=generator)
        weights = torch.rand(ids.shape, generator=generator)
        rows.append(RoutedRows(hidden.to(at.shape.dtype), ids.to(ids_type), weights))
    return rows


def check_received(
    ends: Ends, index: int, got: Any, rows: list[RoutedRows], slots: list[int]
) -> None:
    """F rank `index` has got the rows in `slots` places a source, and no ids in the places left."""
    per_rank = ends.num_experts // len(ends.ffn)
    start = 0
    for sent, places in zip(rows, slots, strict=True):
        count, stop = sent.hidden.shape[0], start + places
        ids = reference.local_ids(sent.expert_ids, index, per_rank)
        here = (ids >= 0).any(dim=1)
        assert torch.equal(got.expert_ids[start : start + count], ids)
        assert (got.expert_ids[start + count : stop] == -1).all()
        assert torch.equal(got.hidden[start : start + count][here], sent.hidden[here])
        assert torch.equal(got.weights[start : start + count][here], sent.weights[here])
        start = stop
    assert got.hidden.shape[0] == start


def exchange(ends: Ends, rows: list[RoutedRows], slots: list[int], spans: list[Span]) -> None:
    """Run one exchange of the A ranks in the spans, and check all that arrives anywhere."""
    sources = [n for span in spans for n in range(span.first, span.first + span.sources)]
    sent = {n: ends.attention[n].dispatch(rows[n], slots=slots[n]) for n in sources}
    for index, end in enumerate(ends.ffn):
        batch = end.receive(spans)
        check_received(ends, index, batch, [rows[n] for n in sources], [slots[n] for n in sources])
        first = index * ends.num_experts // len(ends.ffn)
        outputs = run_experts(batch.hidden, batch.expert_ids + first)
        outputs[batch.expert_ids < 0] = torch.nan  # what no expert has written
        end.reply(outputs, spans)
    for n in sources:
        got = ends.attention[n].combine(sent[n])
        assert torch.equal(got, expected(rows[n], ends.num_experts, len(ends.ffn)))
    for memory in ends.memory:
        assert (memory[:MARGIN] == 99).all() and (memory[-MARGIN:] == 99).all()
    assert flags.failure_of(ends.waits.failure) is None


WIDE = Sizes(1, 2, 4, Shape(1, 2064, 8, BF16), 128, 2048)
FULL = Sizes(2, 2, 4, Shape(3, 48, 5, BF16), 2, 64)


@settings(SLOW, max_examples=6)
@given(sizes.flatmap(lambda at: st.tuples(st.just(at), exchanges(at, 2))), st.booleans())
@example((WIDE, [Exchange([1], "even", 1)]), True)
@example((FULL, [Exchange(n, "even", 2) for n in ([3, 3], [0, 1], [0, 0], [2, 3])]), False)
@example((FULL, [Exchange([3, 3], "one", n) for n in (0, 7)]), True)
def test_decode_exchanges_in_a_row(case: tuple[Sizes, list[Exchange]], wide_ids: bool) -> None:
    """All A ranks take part, in as many slots each."""
    at, sent = case
    with pytest.MonkeyPatch.context() as patch:
        ends = make(at, patch)
        for one in sent:
            slots = [at.shape.cap] * at.attention
            rows = routed(at, one, torch.int64 if wide_ids else torch.int32)
            exchange(ends, rows, slots, [Span(0, at.attention, at.shape.cap)])


@settings(SLOW, max_examples=5)
@given(sizes.flatmap(lambda at: st.tuples(st.just(at), exchanges(at, 3))))
@example((FULL, [Exchange(n, "even", 3) for n in ([3, 2], [0, 1], [0, 0], [2, 0], [1, 3])]))
def test_block_exchanges_in_a_row(case: tuple[Sizes, list[Exchange]]) -> None:
    """Only the A ranks with rows take part, each with as many slots as rows."""
    at, sent = case
    with pytest.MonkeyPatch.context() as patch:
        ends = make(at, patch)
        for one in sent:
            spans = [Span(n, 1, count) for n, count in enumerate(one.counts) if count]
            if spans:
                exchange(ends, routed(at, one, torch.int64), one.counts, spans)


@settings(SLOW, max_examples=3)
@given(sizes.flatmap(lambda at: st.tuples(st.just(at), exchanges(at, 2))))
@example((FULL, [Exchange(n, "even", 4) for n in ([3, 3], [1, 2], [1, 1], [0, 0])]))
def test_a_span_of_several_ranks_may_have_fewer_rows_than_the_cap(
    case: tuple[Sizes, list[Exchange]],
) -> None:
    at, sent = case
    with pytest.MonkeyPatch.context() as patch:
        ends = make(at, patch)
        for one in sent:
            most = max(one.counts)
            exchange(
                ends,
                routed(at, one, torch.int64),
                [most] * at.attention,
                [Span(0, at.attention, most)],
            )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_rounds_of_all_lanes_and_a_block_are_under_way_at_once(order: tuple[int, ...]) -> None:
    """Three lanes and a bulk block, answered in any order, twice over: none disturbs another."""
    topology, experts, shape = Topology(2, 1), 4, Shape(3, 16, 2, FP32)
    *senders, ffn = make_transports(topology, experts, shape, Caps(2, 3), lanes=3)
    rounds = [Round(Path.DECODE, 0, (2, 1, 0), lane) for lane in range(3)]
    rounds.append(Round(Path.BULK, 0, (2, 1, 0), 3))
    for seed in range(2):
        draw = random.Random(seed)
        sent = []
        for round_ in rounds:
            rows = [random_rows(draw, round_.counts[n], shape, experts) for n in range(2)]
            handles = [senders[n].dispatch(rows[n], round_) for n in range(2)]
            sent.append((rows, handles))
        received = {index: ffn.receive(rounds[index]) for index in order}
        for index in reversed(order):
            batch, handle = received[index]
            ffn.reply(run_experts(batch.hidden, batch.expert_ids), handle)
        for rows, handles in sent:
            for n in range(2):
                assert torch.equal(senders[n].combine(handles[n]), expected(rows[n], experts, 1))


@pytest.mark.parametrize(
    ("attention", "ffn", "tp"), [(3, 1, 1), (1, 2, 1), (4, 3, 1), (2, 2, 2)], ids=str
)
def test_emulated_ranks_send_rows_of_their_own(
    monkeypatch: pytest.MonkeyPatch, attention: int, ffn: int, tp: int
) -> None:
    """Two lanes, and more exchanges than draws."""
    monkeypatch.setattr(draws, "DRAWS", 2)
    monkeypatch.setattr(drawn, "BLOCKS", 2)
    monkeypatch.setattr(drawn_kernels, "MAX_BLOCK", 16)
    emulation = Emulation(Topology(1, 1, tp), Topology(attention, ffn, tp))
    exchange_of_sources(emulation, Shape(3, 48, 3, FP32), per_rank=4, lanes=2)


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_stamps_tell_the_stages_of_the_last_step(layers: int) -> None:
    """Of each lane, by a clock that counts the moments taken, whatever was exchanged before."""
    topology, experts, shape = Topology(2, 2), 4, Shape(2, 16, 2, FP32)
    transports = make_transports(topology, experts, shape, Caps(2, 3), lanes=2, layers=layers)
    roles = [topology.role_of(rank) for rank in range(4)]
    stamps = [
        [GraphStamps(one, role, layers) for one in transport.stamps]
        for role, transport in zip(roles, transports, strict=True)
    ]
    draw = random.Random(layers)

    def exchange(lane: int) -> None:
        round_ = Round(Path.DECODE, 0, (2, 1, 0, 0), lane)
        rows = [random_rows(draw, round_.counts[n], shape, experts) for n in range(2)]
        sent = [transports[n].dispatch(rows[n], round_) for n in range(2)]
        for transport in transports[2:]:
            batch, handle = transport.receive(round_)
            transport.reply(run_experts(batch.hidden, batch.expert_ids), handle)
        for n in range(2):
            transports[n].combine(sent[n])

    exchange(1)  # not armed: it leaves nothing
    for lanes in stamps:
        assert not lanes[1].take()[1:].any()
        lanes[1].arm(True)
        assert lanes[1].spent(lanes[1].take()) == []
    for _ in range(2):  # two steps; the second writes over the first
        for lanes in stamps:
            lanes[1].begin()
        for _ in range(layers):
            exchange(1)
        for role, lanes in zip(roles, stamps, strict=True):
            spent = lanes[1].spent(lanes[1].take())
            order = [Stage.DISPATCH, Stage.COMBINE]
            if role is Role.FFN:
                order = [Stage.RECEIVE, Stage.REPLY]
            assert [stage for stage, *_ in spent] == order * layers
            moments = [moment for _, *ends in spent for moment in ends]
            assert moments == sorted(moments) and moments[0] > 0
            assert all(end > start for _, start, end in spent)
    for lanes in stamps:
        assert not lanes[0].take().any(), "the other lane was neither armed nor used"
        before = lanes[1].take().clone()
        lanes[1].arm(False)
        before[0, 0] = 0
        assert torch.equal(lanes[1].take(), before)
    exchange(1)
    assert torch.equal(stamps[-1][1].take(), before), "nothing is written any more"


def test_steps_beyond_the_copies_tell_no_stages() -> None:
    """Until others have been told."""
    stamps = GraphStamps(new_stamps(2, torch.device("cpu")), Role.FFN, 2)
    taken = [stamps.take() for _ in range(100)]
    assert taken[0] is not None and taken[-1] is None
    assert stamps.spent(taken[-1]) == [] == stamps.spent(taken[0])
    assert stamps.take() is not None and stamps.take() is None


def rows_for(ends: Ends) -> RoutedRows:
    return RoutedRows(torch.ones(1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def small(attention: int, ffn: int) -> Ends:
    with pytest.MonkeyPatch.context() as patch:
        return make(Sizes(attention, ffn, 3, Shape(2, 16, 1, FP32), 4, 16), patch)


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("silent", [0, 1])
def test_a_wait_leaves_word_of_a_silent_attention_rank(silent: int, done: int) -> None:
    ends = small(2, 1)
    rows = [rows_for(ends)] * 2
    for _ in range(done):
        exchange(ends, rows, [2, 2], [Span(0, 2, 2)])
    ends.attention[1 - silent].dispatch(rows[0], slots=2)
    ends.ffn[0].receive([Span(0, 2, 2)])
    assert flags.failure_of(ends.waits.failure) == flags.Failure(silent, done + 1)


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("silent", [0, 1])
def test_a_wait_leaves_word_of_a_silent_ffn_rank(silent: int, done: int) -> None:
    ends = small(1, 2)
    rows = [rows_for(ends)]
    for _ in range(done):
        exchange(ends, rows, [2], [Span(0, 1, 2)])
    sent = ends.attention[0].dispatch(rows[0], slots=2)
    answering = ends.ffn[1 - silent]
    answering.receive([Span(0, 1, 2)])
    answering.reply(torch.zeros(2, 1, 16), [Span(0, 1, 2)])
    assert flags.failure_of(ends.waits.failure) is None
    ends.attention[0].combine(sent)
    assert flags.failure_of(ends.waits.failure) == flags.Failure(silent, done + 1)
