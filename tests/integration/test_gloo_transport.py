"""The `gloo` transport between real processes: exact, repeatable, and loud when a peer is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_afd.dispatch.draws import draw
from sglang_afd.dispatch.step_plan import Path as RowPath
from sglang_afd.kernels.exchange_reference import drawn_ids
from sglang_afd.topology import Topology
from tests.support import exchange_world as world
from tests.support.exchange_world import CAPS, FACTS, Failing, Output, Run
from tests.support.processes import wait_until
from tests.support.seeds import fresh_seed

pytestmark = pytest.mark.integration

STEPS = 24
TIMEOUT = 30.0
SHORT = 2.0  # seconds, where a peer is gone
WORLDS = [
    Topology(1, 1),
    Topology(2, 1),
    Topology(2, 2),
    Topology(3, 2),
    Topology(1, 1, attention_tp=2),
    Topology(2, 1, attention_tp=2),
]


def exchange(folder: Path, runs: list[Run], jitter: int) -> list[Output]:
    """What every rank of a fresh world saw of `runs`."""
    folder.mkdir()
    size = runs[0].topology.world_size
    processes = world.launch(world.exchange, size, str(folder), runs, TIMEOUT, jitter)
    try:
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * size
    finally:
        world.end(processes)
    return [world.load(folder, rank) for rank in range(size)]


@pytest.mark.parametrize(
    "topology", WORLDS, ids=lambda t: f"{t.attention_ranks}A{t.ffn_ranks}F-tp{t.attention_tp}"
)
def test_rows_come_back_as_from_one_process(tmp_path: Path, topology: Topology) -> None:
    seed = fresh_seed()
    runs = [Run(topology, dtype, seed, STEPS) for dtype in (torch.float32, torch.bfloat16)]
    outputs = exchange(tmp_path / "first", runs, jitter=seed)

    for number, run in enumerate(runs):
        for rank in topology.attention_world:
            for step in range(STEPS):
                for layer in FACTS.layers:
                    _check(run, outputs[rank].results[number, step, layer], step, layer, rank)
        for rank in topology.ffn_world:
            got = [rows for number_, rows in outputs[rank].received if number_ == number]
            assert got == _rows_of_rounds(run, rank)

    again = exchange(tmp_path / "again", runs, jitter=seed + 1)
    for rank in topology.attention_world:
        assert list(again[rank].results) == list(outputs[rank].results)
        for place, result in outputs[rank].results.items():
            other = again[rank].results[place]
            assert torch.equal(other.view(torch.uint8), result.view(torch.uint8)), place


@pytest.mark.parametrize("whole", [Topology(3, 1), Topology(1, 3), Topology(4, 2)], ids=str)
def test_emulated_ranks_send_rows_of_their_own(tmp_path: Path, whole: Topology) -> None:
    """In decode rounds alone F gets rows for them, as many as the draws have for its experts; the
    real rank gets what the experts that are there make of its own."""
    run = Run(Topology(1, 1), torch.float32, fresh_seed(), STEPS, whole)
    attention, ffn = exchange(tmp_path / "world", [run], jitter=run.seed)
    for step in range(STEPS):
        for layer in FACTS.layers:
            _check(run, attention.results[0, step, layer], step, layer, 0)
    assert ffn.received == [(0, rows) for rows in _rows_of_all_sources(run)]


def _rows_of_all_sources(run: Run) -> list[int]:
    """Rows that the F rank must receive in every round."""
    emulation, cap = run.emulation, CAPS.decode
    draws = draw(emulation, 0, cap=cap, num_experts=FACTS.num_experts, top_k=FACTS.top_k)
    present = emulation.present_experts(FACTS.num_experts)
    wanted, taken = [], 0
    for step in range(run.steps):
        for layer in FACTS.layers:
            ids = run.inputs(step, layer, 0).expert_ids
            for round_ in run.plan(step, 0).rounds:
                own = ids[round_.rows_of(0)]
                sources = [own]
                if round_.path is RowPath.DECODE:
                    sources += drawn_ids(own, draws[taken % len(draws)]).unbind()
                    taken += 1
                hits = (((i >= 0) & (i < present)).any(dim=1).sum() for i in sources)
                wanted.append(int(sum(hits)))
    assert taken > len(draws), "the draws were to come again"
    return wanted


def _check(run: Run, result: torch.Tensor, step: int, layer: int, rank: int) -> None:
    expected, terms = world.reference(run, step, layer, rank)
    assert (result.dtype, result.shape) == (run.dtype, (run.rows(step)[rank], FACTS.hidden_size))
    error = (result.float() - expected).abs()
    if run.dtype is torch.float32:
        assert (error <= 1e-5 * expected.abs().clamp(min=1)).all(), error.max()
    else:  # F rounds each output and each partial sum, A the total, to 8 bits each
        assert (error <= 2**-6 * terms + 1e-5).all(), (error / terms).max()


def _rows_of_rounds(run: Run, rank: int) -> list[int]:
    """Rows that F rank `rank` must receive in every round: a token once, if it wants an expert."""
    owned = run.topology.experts_of(rank, FACTS.num_experts)
    wanted = []
    for step in range(run.steps):
        for layer in FACTS.layers:
            ids = [
                run.inputs(step, layer, peer).expert_ids for peer in run.topology.attention_world
            ]
            hits = [((i >= owned.start) & (i < owned.stop)).any(dim=1) for i in ids]
            for round_ in run.plan(step, rank).rounds:
                taken = (hit[round_.rows_of(peer)] for peer, hit in enumerate(hits))
                wanted.append(sum(int(rows.sum()) for rows in taken))
    return wanted


def test_the_steps_of_a_run_have_every_hard_case() -> None:
    """The runs above are random: show that they contain what they are to test."""
    run = Run(Topology(3, 2), torch.float32, fresh_seed(), STEPS)
    half = FACTS.num_experts // 2
    idle = one_owner = no_expert = empty_places = several_rounds = several_blocks = mixed = False
    for step in range(STEPS):
        rows = run.rows(step)
        idle |= 0 in rows[:3] and any(rows)
        paths = [round_.path.name for round_ in run.plan(step, 0).rounds]
        several_rounds |= paths.count("DECODE") > 1
        several_blocks |= paths.count("BULK") > 1
        mixed |= len(set(paths)) == 2
        for rank in run.topology.attention_world:
            ids = run.inputs(step, 0, rank).expert_ids
            used = ids[ids >= 0]
            one_owner |= used.numel() > 3 and len(set((used // half).tolist())) == 1
            no_expert |= bool((ids < 0).all(dim=1).any())
            empty_places |= bool((ids < 0).any())
    assert idle and one_owner and no_expert and empty_places
    assert several_rounds and several_blocks and mixed


@pytest.mark.parametrize(
    ("failing", "doing"),
    [
        (Failing(2, "hangs"), "sending rows to"),
        (Failing(2, "hangs", replying=True), "waiting for rows of"),
        (Failing(2, "dies"), ""),
        (Failing(2, "dies", replying=True), "waiting for rows of"),
        (Failing(0, "hangs"), "waiting for rows of"),
        (Failing(0, "dies"), "waiting for rows of"),
    ],
    ids=["F-hangs", "F-hangs-late", "F-dies", "F-dies-late", "A-hangs", "A-dies"],
)
def test_a_peer_that_is_gone_is_named_within_the_timeout(
    tmp_path: Path, failing: Failing, doing: str
) -> None:
    topology = Topology(2, 1)
    waiting = [0, 1] if failing.rank == 2 else [2]
    processes = world.launch(world.fail, 3, str(tmp_path), failing, SHORT)
    reports = [tmp_path / f"rank{rank}.txt" for rank in waiting]
    try:
        assert wait_until(lambda: all(report.exists() for report in reports), 90)
    finally:
        world.end(processes)
    for rank, report in zip(waiting, reports, strict=True):
        took, _, message = report.read_text().partition("\n")
        start = f"{topology.name_of(rank)} failed {doing}"
        assert message.startswith(start), message
        assert topology.name_of(failing.rank) in message
        assert f"within {SHORT:g} s (--afd-exchange-timeout)" in message
        assert "check that the peer is alive" in message
        assert float(took) < SHORT + 4
        if failing.how == "hangs":
            assert float(took) > SHORT / 2
