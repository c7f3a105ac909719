"""Real processes that exchange rows over gloo, driven by the extension's own callers.

Every rank derives all inputs of all steps from the seed, so that nothing but the exchange itself
travels between them, and a test can compute what must come out.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sglang_afd.attention.exchange import AttentionExchange
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.dispatch.gloo import GlooTransport
from sglang_afd.dispatch.step_plan import Caps, PlanRow, Round, StepKind, StepPlan
from sglang_afd.dispatch.step_plan import Path as RowPath
from sglang_afd.dispatch.transport import (
    ExchangeError,
    MaskedBatch,
    RoutedRows,
    RowBatch,
    Transport,
)
from sglang_afd.emulation import Emulation
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.ffn.serve import Experts, serve_eagerly
from sglang_afd.observe.stages import HostClock, Stage, StepTimer
from sglang_afd.topology import Role, Topology

CAPS = Caps(decode=5, bulk=8)
FACTS = MoeFacts((0, 1, 2), num_experts=12, top_k=3, hidden_size=24, intermediate_size=16)
MODULE = "tests.support.exchange_world"


@dataclass(frozen=True)
class Run:
    """Steps of one world, all from one seed."""

    topology: Topology
    dtype: torch.dtype
    seed: int
    steps: int
    whole: Topology | None = None
    """What the world stands for, if ranks are emulated."""

    @property
    def emulation(self) -> Emulation:
        return Emulation(self.topology, self.whole or self.topology)

    def rows(self, step: int) -> list[int]:
        """Rows that each world rank sends: all lengths in turn, the first rank idle at times."""
        draw = random.Random(f"{self.seed} rows {step}")
        counts = [
            draw.choice((0, 1, CAPS.decode, CAPS.decode + 1, 13))
            for _ in range(self.topology.dp_size)
        ]
        counts[step % self.topology.attention_ranks] = 0
        if not any(counts[: self.topology.attention_ranks]):
            counts[(step + 1) % self.topology.attention_ranks] = 7
        owners = [self.topology.dp_rank_of(rank) for rank in range(self.topology.world_size)]
        return [counts[owner] if owner < self.topology.attention_ranks else 0 for owner in owners]

    def inputs(self, step: int, layer: int, rank: int) -> RoutedRows:
        """What world rank `rank` sends; every third step all experts lie on one F rank."""
        count, generator = self.rows(step)[rank], self._generator(step, layer, rank)
        experts = range(FACTS.num_experts)
        if step % 3 == 1:
            owner = self.topology.ffn_world[step % len(self.topology.ffn_world)]
            experts = self.topology.experts_of(owner, FACTS.num_experts)
        scores = torch.rand(count, len(experts), generator=generator)
        ids = scores.argsort(dim=1)[:, : FACTS.top_k] + experts.start
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
        if step % 3 == 2 and count:
            ids[0] = -1  # a row that no expert wants
        return RoutedRows(
            torch.randn(count, FACTS.hidden_size, generator=generator).to(self.dtype),
            ids.to(torch.int64 if step % 2 else torch.int32),
            torch.rand(count, FACTS.top_k, generator=generator),
        )

    def plan(self, step: int, rank: int) -> StepPlan:
        """The step's plan as rank `rank` derives it: some ranks decode, some extend."""
        parts = []
        for dp_rank in range(self.topology.dp_size):
            rows = self.rows(step)[dp_rank * self.topology.attention_tp]
            kind = StepKind.EXTEND if (step + dp_rank) % 3 else StepKind.DECODE
            parts.append(PlanRow(step, kind if rows else StepKind.IDLE, rows, 1))
        own = parts[self.topology.dp_rank_of(rank)]
        return StepPlan.from_rows(parts, self.topology, CAPS, rank, own)

    def _generator(self, *where: int) -> torch.Generator:
        return torch.Generator().manual_seed(random.Random(f"{self.seed} {where}").getrandbits(60))


def run_expert(layer: int, number: int, hidden: torch.Tensor) -> torch.Tensor:
    """[m, H] float32 rows -> [m, H]: a gated MLP whose weights differ for every expert."""
    generator = torch.Generator().manual_seed(1000 * layer + number)
    gate, up, down = torch.randn(3, FACTS.hidden_size, FACTS.intermediate_size, generator=generator)
    inner = torch.nn.functional.silu(hidden @ gate) * (hidden @ up)
    return inner @ down.T / FACTS.hidden_size


def reference(run: Run, step: int, layer: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H] float32: what `rank` must get, and the sum of its terms' absolute values."""
    hidden, ids, weights = run.inputs(step, layer, rank)
    total, size = torch.zeros(2, *hidden.shape)
    present = run.emulation.present_experts(FACTS.num_experts)
    for row, place in ((ids >= 0) & (ids < present)).nonzero().tolist():
        output = run_expert(layer, int(ids[row, place]), hidden[row : row + 1].float())[0]
        total[row] += weights[row, place] * output
        size[row] += (weights[row, place] * output).abs()
    return total, size


class Output(NamedTuple):
    """What one rank saw: on A its results by (run, step, layer), on F its received row counts."""

    results: dict[tuple[int, int, int], torch.Tensor]
    received: list[tuple[int, int]]  # (run, rows received) of every round


def exchange(rank: int, folder: str, runs: Sequence[Run], timeout: float, jitter: int) -> None:
    """One rank's process: all steps of all runs; `jitter` seeds how late ranks come to a layer."""
    _join(rank, folder, runs[0].topology.world_size, timeout)
    delays = random.Random(f"{jitter} {rank}")
    output = Output({}, [])
    for number, run in enumerate(runs):
        transport = _transport(run.topology, rank, run.dtype, timeout, run.emulation)
        if run.topology.role_of(rank) is Role.ATTENTION:
            _attend(run, number, rank, transport, output, delays)
        else:
            _serve(run, number, rank, transport, output, delays)
    torch.save(output._asdict(), Path(folder) / f"rank{rank}.pt")
    dist.barrier()


def _attend(
    run: Run, number: int, rank: int, transport: Transport, output: Output, delays: random.Random
) -> None:
    topology = run.topology
    config = AfdConfig(
        attention_ranks=topology.attention_ranks,
        ffn_ranks=topology.ffn_ranks,
        attention_tp=topology.attention_tp,
        max_tokens_per_rank=CAPS.decode,
    )
    context = RankContext(config, rank, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {}, serving=True)
    layers = AttentionExchange(context, transport)
    for step in range(run.steps):
        context.plan = run.plan(step, rank)
        with layers.step():
            for layer in FACTS.layers:
                _dawdle(delays)
                output.results[number, step, layer] = layers(*run.inputs(step, layer, rank))


def _serve(
    run: Run, number: int, rank: int, transport: Transport, output: Output, delays: random.Random
) -> None:
    owned = run.emulation.experts_of(rank, FACTS.num_experts)

    def of(layer: int) -> Experts:
        def experts(batch: RowBatch | MaskedBatch) -> torch.Tensor:
            assert isinstance(batch, RowBatch)
            output.received.append((number, batch.hidden.shape[0]))
            _dawdle(delays)
            shape = (*batch.expert_ids.shape, FACTS.hidden_size)
            outputs = torch.full(shape, torch.nan, dtype=batch.hidden.dtype)
            for local, expert in enumerate(owned):
                row, place = (batch.expert_ids == local).nonzero(as_tuple=True)
                part = run_expert(layer, expert, batch.hidden[row].float())
                outputs[row, place] = part.to(outputs.dtype)
            return outputs

        return experts

    timer = StepTimer(Stage.EXPERTS, HostClock, rank=None, experts=len(owned))
    for step in range(run.steps):
        layers = [of(layer) for layer in FACTS.layers]
        serve_eagerly(run.plan(step, rank), layers=layers, transport=transport, timer=timer)


class Failing(NamedTuple):
    """How one rank of a 2A+1F world fails in a round."""

    rank: int
    how: str  # "dies" or "hangs"
    replying: bool = False  # F: only when it has received the round's rows


def fail(rank: int, folder: str, failing: Failing, timeout: float) -> None:
    """One rank's process: a good round, then one in which a rank fails; writes what others saw."""
    topology = Topology(2, 1)
    _join(rank, folder, topology.world_size, timeout)
    transport = _transport(topology, rank, torch.float32, timeout)
    _round(topology, rank, transport, None)
    dist.barrier()
    started = time.monotonic()
    try:
        _round(topology, rank, transport, failing if rank == failing.rank else None)
        seen = "no error"
    except ExchangeError as error:
        seen = str(error)
    report = Path(folder) / f"rank{rank}.txt"
    report.with_suffix(".part").write_text(f"{time.monotonic() - started}\n{seen}")
    report.with_suffix(".part").rename(report)
    time.sleep(3600)  # a rank that failed must not be what its peer sees next; the test ends it


def _round(topology: Topology, rank: int, transport: Transport, failing: Failing | None) -> None:
    if failing is not None and not failing.replying:
        _fail(failing)
    round_ = Round(RowPath.DECODE, 0, (2, 2, 0))
    if topology.role_of(rank) is Role.FFN:
        batch, handle = transport.receive(round_)
        if failing is not None:
            _fail(failing)
        transport.reply(batch.hidden.unsqueeze(1).repeat(1, FACTS.top_k, 1), handle)
        return
    rows = RoutedRows(
        torch.ones(2, FACTS.hidden_size),
        torch.zeros(2, FACTS.top_k, dtype=torch.int64),
        torch.ones(2, FACTS.top_k),
    )
    transport.combine(transport.dispatch(rows, round_))


def _fail(failing: Failing) -> None:
    if failing.how == "hangs":
        time.sleep(3600)
    os._exit(9)


def _join(rank: int, folder: str, world_size: int, timeout: float) -> None:
    torch.set_num_threads(1)  # several ranks share the cores
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=max(timeout, 60)),
    )


def _transport(
    topology: Topology,
    rank: int,
    dtype: torch.dtype,
    timeout: float,
    emulation: Emulation | None = None,
) -> GlooTransport:
    return GlooTransport(
        topology=topology,
        rank=rank,
        num_experts=FACTS.num_experts,
        hidden_size=FACTS.hidden_size,
        top_k=FACTS.top_k,
        dtype=dtype,
        caps=CAPS,
        timeout=timeout,
        emulation=emulation,
    )


def _dawdle(delays: random.Random) -> None:
    if delays.random() < 0.1:
        time.sleep(delays.random() * 0.01)


def launch(target: Any, world_size: int, *args: Any) -> list[BaseProcess]:
    """Start ``target(rank, *args)`` for every rank; torch is imported once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([MODULE])
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        process = context.Process(target=target, args=(rank, *args), daemon=True)
        process.start()
        processes.append(process)
    return processes


def end(processes: Sequence[BaseProcess]) -> None:
    """Kill what still runs of `processes`."""
    for process in processes:
        process.kill()
        process.join()


def load(folder: Path, rank: int) -> Output:
    """What `rank` saw."""
    return Output(**torch.load(folder / f"rank{rank}.pt", weights_only=True))
