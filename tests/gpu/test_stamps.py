"""Stages of steps that are replayed from CUDA graphs: told, true, and cheap.

The first tests run both roles in one process on one GPU, as tests/gpu/test_graphs.py does; the last
one serves at 1A1F on two.
"""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as File
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.two_gpus import CALM, SEED, SHAPE
from sglang_afd.config import AfdConfig
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import StepKind, StepPlan
from sglang_afd.dispatch.transport import MaskedBatch, RoutedRows, RowBatch
from sglang_afd.dispatch.turns import NoTurns
from sglang_afd.ffn.graph import GraphServer
from sglang_afd.observe.stages import DeviceClock, Stage, StepTimer, StepTimes
from sglang_afd.observe.stamps import GraphStamps
from sglang_afd.observe.timeline import overlap, perfetto
from sglang_afd.topology import Role
from sglang_afd.trace import record
from tests.gpu.test_graphs import (
    CAPS,
    EXPERTS,
    FORM,
    LAYERS,
    AttentionRank,
    exchange_once,
    run_layer,
)
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.gpu_servers import AFD, Asked, started
from tests.support.local_ends import make_transports, random_rows
from tests.support.workload import prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS, LANES = 40, 2
SLEEP = 1_000_000  # cycles: half a millisecond and more
LAYER = 200e-6
"""Seconds: less than a layer of a decode step takes in any cell of docs/performance.md."""
REPLAYS = 200


class Pair(NamedTuple):
    """Both roles of 1A1F in this process, with what their timers have told."""

    attention: AttentionRank
    server: GraphServer
    stream: torch.cuda.Stream
    told: dict[Role, list[StepTimes]]

    def step(self, number: int, rows: RoutedRows, *, replay: bool = True) -> None:
        """One decode step of a lane."""
        count = rows.hidden.shape[0]
        kinds = (StepKind.DECODE, StepKind.IDLE)
        plan = StepPlan(number, kinds, (count, 0), CAPS, number % LANES)
        self.attention.forward(plan, rows, replay=replay)
        with torch.cuda.stream(self.stream):
            self.server.serve(plan)


def slow_layer(batch: RowBatch | MaskedBatch) -> torch.Tensor:
    """Experts that take their time."""
    torch.cuda._sleep(SLEEP)
    return run_layer(batch)


def make_pair(layer: Any = run_layer, *, stamped: bool = True) -> Pair:
    config = AfdConfig(attention_ranks=1, ffn_ranks=1, transport="nvlink", lanes=LANES)
    transports = make_transports(
        config.topology,
        EXPERTS,
        FORM,
        CAPS,
        lanes=LANES,
        device="cuda",
        timeout=20.0,
        layers=LAYERS if stamped else 0,
    )
    exchange_once(config.topology, transports, LANES)
    layer(next(iter(transports[-1].samples())))
    timer = StepTimer(Stage.EXPERTS, DeviceClock, rank=None, experts=EXPERTS)
    turns = NoTurns()
    server = GraphServer([layer] * LAYERS, transports[-1], timer, lanes=LANES, turns=turns)
    attention = AttentionRank(config, 0, transports[0])
    told: dict[Role, list[StepTimes]] = {Role.ATTENTION: [], Role.FFN: []}
    use(attention.context.timer, transports[0], Role.ATTENTION, told)
    use(timer, transports[-1], Role.FFN, told)
    torch.cuda.synchronize()
    return Pair(attention, server, torch.cuda.Stream(), told)


def use(
    timer: StepTimer, transport: NvlinkTransport, role: Role, told: dict[Role, list[StepTimes]]
) -> None:
    for stamps in transport.stamps:
        GraphStamps(stamps, role, LAYERS).begin()  # loads its kernel
    timer.use([GraphStamps(stamps, role, LAYERS) for stamps in transport.stamps])
    timer.subscribe(told[role].append)


def check_spans(times: StepTimes, stages: list[Stage], own: Stage) -> None:
    """All layers' stages in order, without gaps, own work between them."""
    order = [stage for each in stages for stage in (own, each)]
    assert [span.stage for span in times.spans] == [*order * LAYERS, own]
    ends = [times.start, *(span.end for span in times.spans)]
    assert [span.start for span in times.spans] == ends[:-1] and ends[-1] == times.end
    assert ends == sorted(ends)


def test_replayed_steps_tell_their_stages(record_property: Any) -> None:
    """The experts' sleep is found in F's experts and in A's wait for them, in each lane."""
    pair = make_pair(slow_layer)
    rows = random_rows(random.Random(1), 4, FORM, EXPERTS, "cuda")
    torch.cuda.synchronize()
    for number in range(STEPS):
        pair.step(number, rows)
        if number % 4 == 3:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    idle = StepPlan(STEPS, (StepKind.IDLE,) * 2, (0, 0), CAPS)
    pair.attention.context.timer.agreed(idle)
    pair.server._timer.agreed(idle)
    slept = alone(slow_layer, rows)
    record_property("one layer's experts alone, ms", f"{slept * 1e3:.4f}")
    for role, stages, own in (
        (Role.ATTENTION, [Stage.DISPATCH, Stage.COMBINE], Stage.ATTENTION),
        (Role.FFN, [Stage.RECEIVE, Stage.REPLY], Stage.EXPERTS),
    ):
        told = pair.told[role]
        assert [times.plan.step_id for times in told] == list(range(STEPS))
        assert all(times.replayed for times in told)
        for times in told:
            check_spans(times, stages, own)
        spent = [times.by_stage() for times in told]
        means = {stage: statistics.median(one[stage] for one in spent) for stage in spent[0]}
        record_property(
            f"{role.value}: ms a step", {s: round(t * 1e3, 4) for s, t in means.items()}
        )
        busy = means[Stage.COMBINE if role is Role.ATTENTION else Stage.EXPERTS]
        assert busy >= 0.95 * LAYERS * slept
        if role is Role.FFN:
            assert min(one[Stage.EXPERTS] for one in spent) >= 0.95 * LAYERS * slept


def alone(layer: Any, rows: RoutedRows) -> float:
    """Seconds of one layer's experts in a graph of its own, by events."""
    batch = RowBatch(rows.hidden, rows.expert_ids, rows.weights)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        layer(batch)
    times = []
    for _ in range(10):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            first.record()
            graph.replay()
            last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return min(times)


def test_eager_marks_tell_the_same() -> None:
    """The experts' time by marks on the host and by the kernels' moments agrees within 5 %."""
    pair = make_pair(slow_layer)
    rows = random_rows(random.Random(2), 40, FORM, EXPERTS, "cuda")  # slices: eager on F too
    few = random_rows(random.Random(2), 4, FORM, EXPERTS, "cuda")
    torch.cuda.synchronize()
    for number in range(STEPS):
        eager = number // LANES % 2 == 1
        pair.step(number, rows if eager else few, replay=not eager)
        torch.cuda.synchronize()
    idle = StepPlan(STEPS, (StepKind.IDLE,) * 2, (0, 0), CAPS)
    pair.server._timer.agreed(idle)
    told = pair.told[Role.FFN]
    each = {
        replayed: statistics.median(
            times.by_stage()[Stage.EXPERTS] / len(times.rounds)
            for times in told
            if times.replayed == replayed
        )
        for replayed in (True, False)
    }
    assert each[True] == pytest.approx(each[False], rel=0.05)


def test_stamps_cost_under_a_hundredth_of_a_step(record_property: Any) -> None:
    """A layer's exchange with stamps, armed or not, beside one without: medians of replays."""
    made = {"none": make_pair(stamped=False), "stamps": make_pair()}
    rows = random_rows(random.Random(3), 16, FORM, EXPERTS, "cuda")
    plan = StepPlan(0, (StepKind.DECODE, StepKind.IDLE), (16, 0), CAPS, 0)
    for pair in made.values():
        for timer in (pair.attention.context.timer, pair.server._timer):
            for role in Role:
                timer.forget(pair.told[role].append)
        pair.attention.forward(plan, rows, replay=True)
        with torch.cuda.stream(pair.stream):
            pair.server.serve(plan)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {"none": [], "off": [], "armed": []}
    for _ in range(REPLAYS):
        for name, times in found.items():
            pair = made["none" if name == "none" else "stamps"]
            timers = (pair.attention.context.timer, pair.server._timer)
            for timer in timers:
                timer._arm(name == "armed")
            torch.cuda.synchronize()
            graph, lane = pair.attention.lanes[0].graphs[16], pair.server._lanes[0]
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(lane.stream):
                lane.graph.replay()  # it waits for the rows
            time.sleep(0.0005)
            with torch.cuda.stream(pair.attention.streams[0]):
                first.record()
                graph.replay()
                last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1e3 / LAYERS)
    medians = {name: statistics.median(times) for name, times in found.items()}
    record_property("us a layer", {name: round(t * 1e6, 3) for name, t in medians.items()})
    for name in ("off", "armed"):
        added = medians[name] - medians["none"]
        assert added < 0.01 * LAYER, f"{name}: {added * 1e6:.2f} us a layer more, {medians}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_traces_and_metrics_of_a_server_show_stages_of_replayed_steps(
    tmp_path: File, record_property: Any
) -> None:
    model = seeded_qwen3_moe(tmp_path / "model", seed=SEED, dtype=torch.bfloat16, **SHAPE, **CALM)
    flags = ("--afd-lanes", "2", "--afd-max-tokens-per-rank", "16", "--max-running-requests", "8")
    more = ("--max-total-tokens", "16384", "--enable-metrics")
    with started({"lanes": Asked(model, (*AFD, *flags, *more))}, tmp_path) as servers:
        client = servers.client("lanes")
        with ThreadPoolExecutor(4) as pool:
            for prompt in prompts([20] * 4, seed=73):
                pool.submit(client.generate, prompt, 600)
            trace = record(client.url, 100, 30.0)
        servers.check_replayed("lanes")
        text = client.get("/metrics").text
    layers = SHAPE["layers"]
    for rank in trace.ranks:
        decodes = [step for step in rank.steps if step.path == "decode"]
        told = [step for step in decodes if step.spans]
        assert len(told) >= 0.9 * len(decodes) > 50, (rank.name, len(told), len(decodes))
        sent = {"attention": "dispatch", "ffn": "reply"}[rank.role]
        for step in told:
            assert [stage for stage, *_ in step.spans].count(sent) == layers
        assert {step.lane for step in told} == {0, 1}
    found = overlap(trace)
    record_property("overlap", str(found))
    assert 0 < found.attention < found.step and 0 < found.experts < found.step
    events = [e for e in perfetto(trace)["traceEvents"] if e.get("cat") == "stage"]
    assert {event["args"]["layer"] for event in events} >= set(range(layers))
    for stage in ("attention", "dispatch", "combine", "receive", "experts", "reply"):
        lines = [
            line
            for line in text.splitlines()
            if line.startswith("sglang_afd_stage_seconds_total")
            and f'stage="{stage}"' in line
            and 'path="decode"' in line
        ]
        assert {lane for line in lines for lane in "01" if f'lane="{lane}"' in line} == {"0", "1"}
        assert all(float(line.rsplit(" ", 1)[1]) > 0 for line in lines)
    assert any(
        line.startswith("sglang_afd_replayed_steps_total") and float(line.rsplit(" ", 1)[1]) > 0
        for line in text.splitlines()
    )
