"""CUDA graphs of both roles over `nvlink`: ranks that replay, decode eagerly, prefill or are idle,
in one lane or several beside one another.

All ranks run in one process on one GPU, each on streams of its own, with every layer's experts the
reference's; so every result has exactly the bits that the reference gives.
"""

from __future__ import annotations

import os
import random
from typing import NamedTuple

import pytest
import torch

from sglang_afd.attention.empty_rounds import EmptyRounds
from sglang_afd.attention.exchange import AttentionExchange
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.dispatch.channel import Shape
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import Caps, Path, StepKind, StepPlan
from sglang_afd.dispatch.transport import MaskedBatch, RoutedRows, RowBatch
from sglang_afd.dispatch.turns import ENV, NoTurns, Turns, turns_of
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.ffn.graph import GraphServer
from sglang_afd.observe.stages import HostClock, Stage, StepTimer
from sglang_afd.topology import Role, Topology
from tests.support.emulated import ids_of_sources
from tests.support.local_ends import (
    expected,
    make_transports,
    present_part,
    random_rows,
    run_experts,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TIMER = StepTimer(Stage.EXPERTS, HostClock, rank=None, experts=1)  # nobody listens

SEED = int(os.environ.get("SEED", random.randrange(2**31)))
STEPS = int(os.environ.get("STEPS", 200))
LANE_STEPS = int(os.environ.get("STEPS", 3000))  # a third of them of each lane
LAYERS, EXPERTS, TOP_K, HIDDEN = 3, 16, 4, 256
CAPS = Caps(decode=16, bulk=64)
BUCKETS = (4, 16)
FORM = Shape(CAPS.decode, HIDDEN, TOP_K, torch.bfloat16)
FACTS = MoeFacts(tuple(range(LAYERS)), EXPERTS, TOP_K, HIDDEN, intermediate_size=64)


class Graphs(NamedTuple):
    """Of one lane, by bucket: what they read and what they give."""

    inputs: dict[int, RoutedRows]
    outputs: dict[int, list[torch.Tensor]]
    graphs: dict[int, torch.cuda.CUDAGraph]


class AttentionRank:
    """One A rank: its exchange, every lane's graphs and stream, and one more for prefills."""

    def __init__(
        self,
        config: AfdConfig,
        rank: int,
        transport: NvlinkTransport,
        turns: Turns = NoTurns(),  # noqa: B008 - it has no state
    ) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(config.lanes + 1)]
        family = FAMILIES["Qwen3MoeForCausalLM"]
        self.context = RankContext(config, rank, family, FACTS, {}, caps=CAPS)
        self.exchange = AttentionExchange(self.context, transport)
        self.exchange.take_turns(turns)
        self.lanes = [self._record(lane) for lane in range(config.lanes)]
        none = RoutedRows(*(field[:0] for field in self.lanes[0].inputs[BUCKETS[0]]))
        self.exchange.use(
            [EmptyRounds(transport, LAYERS, none, lane) for lane in range(config.lanes)]
        )
        self.context.serving = True

    def _record(self, lane: int) -> Graphs:
        self.context.lane = lane
        made = Graphs({}, {}, {})
        for bucket in BUCKETS:
            hidden = torch.zeros(bucket, HIDDEN, dtype=torch.bfloat16, device="cuda")
            ids = torch.full((bucket, TOP_K), -1, dtype=torch.int32, device="cuda")
            rows = RoutedRows(hidden, ids, torch.zeros(bucket, TOP_K, device="cuda"))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.streams[lane]):
                made.outputs[bucket] = [self.exchange(*rows) for _ in range(LAYERS)]
            made.inputs[bucket], made.graphs[bucket] = rows, graph
        return made

    def forward(
        self, plan: StepPlan, rows: RoutedRows, *, replay: bool, delay: int = 0
    ) -> list[torch.Tensor]:
        """Every layer's output for the same rows.

        Args:
            delay: cycles that the lane's stream sleeps first.
        """
        self.context.plan = plan
        with torch.cuda.stream(self.streams[plan.lane]):
            torch.cuda._sleep(delay)
            if self.exchange.skips():
                return []
            with self.exchange.step():
                if not replay:
                    return [self.exchange(*rows) for _ in range(LAYERS)]
                count = rows.hidden.shape[0]
                bucket = min(b for b in BUCKETS if b >= count)
                inputs, outputs, graphs = self.lanes[plan.lane]
                for field, here in zip(rows, inputs[bucket], strict=True):
                    here[:count].copy_(field)
                inputs[bucket].expert_ids[count:] = -1
                graphs[bucket].replay()
                self.exchange.replayed()
                return [output[:count].clone() for output in outputs[bucket]]


def run_layer(batch: RowBatch | MaskedBatch) -> torch.Tensor:
    assert isinstance(batch, RowBatch)
    return run_experts(batch.hidden, batch.expert_ids)


def transports_of(config: AfdConfig) -> list[NvlinkTransport]:
    return make_transports(
        config.topology,
        EXPERTS,
        FORM,
        CAPS,
        lanes=config.lanes,
        emulation=config.emulation,
        device="cuda",
        timeout=20.0,
    )


def exchange_once(topology: Topology, transports: list[NvlinkTransport], lanes: int = 1) -> None:
    """Load every kernel before a stream waits for another: one exchange a path, rank after rank."""
    kinds = (StepKind.DECODE,) * topology.attention_ranks + (StepKind.IDLE,)
    rows = (1,) * topology.attention_ranks + (0,)
    plans = [StepPlan(0, kinds, rows, CAPS, lane) for lane in range(lanes)]
    extends = (*[StepKind.EXTEND] * topology.attention_ranks, StepKind.IDLE)
    for plan in (*plans, StepPlan(0, extends, rows, CAPS)):
        for round_ in plan.rounds:
            sent = [
                transport.dispatch(random_rows(random.Random(1), 1, FORM, EXPERTS, "cuda"), round_)
                for transport in transports[:-1]
            ]
            batch, handle = transports[-1].receive(round_)
            transports[-1].reply(run_layer(batch), handle)
            for transport, one in zip(transports[:-1], sent, strict=True):
                transport.combine(one)
    torch.cuda.synchronize()


def some_plan(draw: random.Random, step: int, attention_ranks: int) -> StepPlan:
    """Ranks that decode in one or more rounds, prefill, or have nothing."""
    kinds, counts = [], []
    for _ in range(attention_ranks):
        kind = draw.choice((StepKind.DECODE, StepKind.DECODE, StepKind.EXTEND))
        most = 150 if kind is StepKind.EXTEND else draw.choice((16, 16, 16, 40))
        counts.append(draw.choice((0, 1, draw.randint(1, most), most)))
        kinds.append(kind if counts[-1] else StepKind.IDLE)
    return StepPlan(step, (*kinds, StepKind.IDLE), (*counts, 0), CAPS)


def experts_wanted(config: AfdConfig, plans: list[StepPlan], inputs: list[list[RoutedRows]]) -> int:
    """How many (row, expert) pairs F must get in all steps, those of emulated ranks among them."""
    emulation = config.emulation
    present = emulation.present_experts(EXPERTS)
    total, number = 0, 1  # the first exchange was `exchange_once`
    for plan, rows_of in zip(plans, inputs, strict=True):
        for rank, rows in enumerate(rows_of):
            if plan.rows_of(Path.BULK, rank):
                total += LAYERS * int(((rows.expert_ids >= 0) & (rows.expert_ids < present)).sum())
        for _ in range(LAYERS):
            for round_ in plan.rounds_of(Path.DECODE):
                number += 1
                sent = [
                    RoutedRows(*(field[round_.rows_of(rank)] for field in rows))
                    for rank, rows in enumerate(rows_of)
                ]
                ids = ids_of_sources(emulation, sent, number, cap=CAPS.decode, experts=EXPERTS)
                total += int(((ids >= 0) & (ids < present)).sum())
    return total


@pytest.mark.parametrize(
    ("attention_ranks", "emulated"),
    [(1, None), (2, None), (3, None), (1, (3, None)), (1, (None, 4)), (1, (12, 2))],
    ids=str,
)
def test_replays_and_eager_steps_give_the_same_bits(
    attention_ranks: int, emulated: tuple[int | None, int | None] | None
) -> None:
    """Any mixture of what the ranks do in a step; steps are queued without waiting for results.

    Emulated ranks change neither the real rank's rows nor what it gets from the experts that are
    there, and F gets as many rows for them as they must have.
    """
    print(f"SEED={SEED}")
    draw = random.Random(SEED)
    whole = emulated or (None, None)
    config = AfdConfig(
        attention_ranks=attention_ranks,
        ffn_ranks=1,
        transport="nvlink",
        emulated_attention_ranks=whole[0],
        emulated_ffn_ranks=whole[1],
    )
    topology = config.topology
    transports = transports_of(config)
    exchange_once(topology, transports)
    got, only = torch.zeros(2, 1, dtype=torch.int64, device="cuda")

    def count_and_run(batch: RowBatch | MaskedBatch) -> torch.Tensor:
        assert isinstance(batch, RowBatch)
        # by an atomic addition: blocks of prefills run beside decode rounds
        got.scatter_add_(0, only, (batch.expert_ids >= 0).sum().view(1))
        return run_layer(batch)

    for batch in transports[-1].samples():  # loads the counting's kernels
        count_and_run(batch)
    torch.cuda.synchronize()
    got.zero_()
    server = GraphServer([count_and_run] * LAYERS, transports[-1], TIMER, lanes=1, turns=NoTurns())
    ranks = [
        AttentionRank(config, rank, transport) for rank, transport in enumerate(transports[:-1])
    ]
    served = torch.cuda.Stream()
    torch.cuda.synchronize()
    plans = [some_plan(draw, step, attention_ranks) for step in range(STEPS)]
    inputs = [
        [random_rows(draw, count, FORM, EXPERTS, "cuda") for count in plan.rows[:-1]]
        for plan in plans
    ]
    torch.cuda.synchronize()
    results = []
    for step, (plan, rows_of) in enumerate(zip(plans, inputs, strict=True)):
        one_round = len(plan.rounds_of(Path.DECODE)) == 1
        for rank, kind, rows in zip(ranks, plan.kinds, rows_of, strict=False):
            replay = kind is StepKind.DECODE and one_round and draw.random() < 0.7
            outputs = rank.forward(plan, rows, replay=replay)
            results.append((step, kind, replay, rows, outputs))
        with torch.cuda.stream(served):
            server.serve(plan)
        if step % 10 == 9:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    present = config.emulation.present_experts(EXPERTS)
    for step, kind, replay, rows, outputs in results:
        assert len(outputs) == (LAYERS if rows.hidden.shape[0] else 0)
        wanted = expected(present_part(rows, present), present, 1)
        for output in outputs:
            assert torch.equal(output, wanted), (step, kind, replay)
    assert int(got) == experts_wanted(config, plans, inputs)


def test_a_prefill_does_not_hold_up_the_decode_of_others() -> None:
    """The decoding rank's step ends while the extending rank's forward still waits to begin."""
    config = AfdConfig(attention_ranks=2, ffn_ranks=1, transport="nvlink")
    topology = config.topology
    transports = transports_of(config)
    exchange_once(topology, transports)
    server = GraphServer([run_layer] * LAYERS, transports[-1], TIMER, lanes=1, turns=NoTurns())
    decoding, extending = (
        AttentionRank(config, rank, transport) for rank, transport in enumerate(transports[:-1])
    )
    served = torch.cuda.Stream()
    draw = random.Random(SEED)
    plan = StepPlan(0, (StepKind.DECODE, StepKind.EXTEND, StepKind.IDLE), (4, 60, 0), CAPS)
    few = random_rows(draw, 4, FORM, EXPERTS, "cuda")
    many = random_rows(draw, 60, FORM, EXPERTS, "cuda")
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    outputs = decoding.forward(plan, few, replay=True)
    done.record(decoding.streams[0])
    with torch.cuda.stream(served):
        server.serve(plan)
    extending.context.plan = plan
    with torch.cuda.stream(extending.streams[0]), extending.exchange.step():
        torch.cuda._sleep(2_000_000_000)  # about a second before the prefill's first layer
        late = [extending.exchange(*many) for _ in range(LAYERS)]
        ready = torch.cuda.Event()
        ready.record()
    done.synchronize()
    assert not ready.query()
    torch.cuda.synchronize()
    for output, rows in ((outputs[0], few), (late[-1], many)):
        assert torch.equal(output, expected(rows, EXPERTS, 1))


def lane_plan(draw: random.Random, step: int, lane: int, attention_ranks: int) -> StepPlan:
    """A turn of a decode lane, or of the prefill lane, which `LANES` counts last."""
    extends = lane == LANES
    most = 150 if extends else draw.choice((16, 16, 16, 40))
    counts = [draw.choice((0, 1, draw.randint(1, most), most)) for _ in range(attention_ranks)]
    kind = StepKind.EXTEND if extends else StepKind.DECODE
    kinds = [kind if count else StepKind.IDLE for count in counts]
    return StepPlan(step, (*kinds, StepKind.IDLE), (*counts, 0), CAPS, lane)


LANES = 2
DELAY = 300_000  # cycles: up to 0.2 ms, some of these steps' lengths


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("attention_ranks", [1, 2])
def test_lanes_beside_one_another_give_the_bits_of_lanes_in_turn(
    attention_ranks: int, in_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two decode lanes and prefills, all streams held up at random, nothing waits for results."""
    print(f"SEED={SEED}")
    draw = random.Random(SEED)
    config = AfdConfig(
        attention_ranks=attention_ranks, ffn_ranks=1, transport="nvlink", lanes=LANES
    )
    transports = transports_of(config)
    exchange_once(config.topology, transports, LANES)
    monkeypatch.setenv(ENV, "all" if in_turns else "none")
    turns = [turns_of(Role.FFN, LANES, "cuda", 20.0) for _ in range(config.topology.world_size)]
    server = GraphServer([run_layer] * LAYERS, transports[-1], TIMER, lanes=LANES, turns=turns[-1])
    ranks = [
        AttentionRank(config, rank, transport, turns[rank])
        for rank, transport in enumerate(transports[:-1])
    ]
    served = torch.cuda.Stream()
    torch.cuda.synchronize()
    for first in range(0, LANE_STEPS, 100):
        results, most = [], min(100, LANE_STEPS - first)
        for step in range(first, first + most):
            plan = lane_plan(draw, step, step % (LANES + 1), attention_ranks)
            one_round = plan.lane < LANES and len(plan.rounds_of(Path.DECODE)) == 1
            for rank, count in zip(ranks, plan.rows, strict=False):
                rows = random_rows(draw, count, FORM, EXPERTS, "cuda")
                delay = draw.choice((0, draw.randrange(DELAY)))
                rank.streams[plan.lane].wait_stream(torch.cuda.current_stream())
                outputs = rank.forward(
                    plan, rows, replay=one_round and draw.random() < 0.8, delay=delay
                )
                results.append((plan, rows, outputs))
            with torch.cuda.stream(served):
                server.serve(plan)
        torch.cuda.synchronize()
        for plan, rows, outputs in results:
            for output in outputs:
                assert torch.equal(output, expected(rows, EXPERTS, 1)), plan


def test_work_in_turns_never_runs_side_by_side() -> None:
    """Two streams count up and down what is at work, in 200 turns each; nobody sees another."""
    turns = turns_of(Role.FFN, 2, "cuda", 20.0)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    at_work, most = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    draw = random.Random(SEED)
    one = torch.ones_like(at_work)
    for _ in range(3):  # loads the kernels
        at_work += one
        torch.maximum(most, at_work, out=most)
        at_work -= one
    torch.cuda.synchronize()
    for _ in range(200):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(draw.randrange(20_000))
                turns.take()
                at_work += one
                torch.cuda._sleep(draw.randrange(20_000))
                torch.maximum(most, at_work, out=most)
                at_work -= one
                turns.end()
    torch.cuda.synchronize()
    assert int(most) == 1 and int(at_work) == 0
