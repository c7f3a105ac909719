"""Token rate of a prefill's MoE layer: experts on the FFN rank against the same layer colocated.

    python -m benchmarks.prefill --out FILE.json

Two GPUs, one attention and one FFN rank over `nvlink`; Qwen3-30B-A3B's shape of experts in BF16,
run by SGLang's fused Triton kernels in both cases; needs SGLang with its CUDA packages.  One
prefill of 8192 tokens travels in blocks of P rows (the bulk path) or in slices of 128 (the decode
path).  Colocated: the FFN rank's GPU runs the layer on all rows at once, and combines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.progress import say
from benchmarks.ranks import as_rank, run_pair
from sglang_afd.dispatch.arena import symmetric_arena
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import Caps, StepKind, StepPlan
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.topology import Topology
from sglang_afd.upstream.bare_experts import BareExperts
from sglang_afd.validate import environment

TOKENS, SLICE, BLOCKS = 8192, 128, (1024, 2048, 4096, 8192)
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
LAYERS, REPEATS = 8, 10
TOPOLOGY = Topology(1, 1)
BOUND = 300


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the record goes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        as_rank(args.rank, args.meet, lambda: _measured_as(args.rank), args.out)
    shape = {"tokens": TOKENS, "experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN,
             "intermediate": INTERMEDIATE, "layers": LAYERS}  # fmt: skip
    result = run_pair("benchmarks.prefill", seconds=BOUND)
    record = {"identity": environment.describe(), "shape": shape, "results": result}
    args.out.write_text(json.dumps(record, indent=1) + "\n")


def _measured_as(rank: int) -> dict[str, Any]:
    """Rates on the attention rank; the FFN rank answers and measures the colocated layer."""
    experts = BareExperts(EXPERTS, HIDDEN, INTERMEDIATE) if rank else None
    rows = _rows()
    wanted = torch.empty_like(rows.hidden)
    colocated = _colocated(experts, rows, wanted) if experts else []
    shared = [colocated]
    dist.broadcast_object_list(shared, src=1)
    dist.broadcast(wanted, src=1)
    results: dict[str, Any] = {"colocated": _rates(shared[0])}
    for kind, cap in (("slices", SLICE), *(("blocks", block) for block in BLOCKS)):
        bulk = kind == "blocks"
        caps = Caps(SLICE, cap if bulk else SLICE)
        row_kind = StepKind.EXTEND if bulk else StepKind.DECODE
        plan = StepPlan(1, (row_kind, StepKind.IDLE), (TOKENS, 0), caps)
        transport = NvlinkTransport(
            topology=TOPOLOGY,
            rank=rank,
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            dtype=torch.bfloat16,
            caps=caps,
            timeout=20.0,
            make_arena=lambda size: symmetric_arena(size, dist.group.WORLD),
        )
        layer = _served(experts, transport, plan) if experts else _asked(rows, transport, plan)
        result = layer()
        torch.cuda.synchronize()
        times = _times(layer)
        if result is not None:
            error = ((result - wanted).float().norm() / wanted.float().norm()).item()
            results[f"{kind} of {cap}"] = {
                **_rates(times),
                "of_colocated": statistics.median(shared[0]) / statistics.median(times),
                "relative_error": error,
            }
            say(f"{kind} of {cap}: {json.dumps(results[f'{kind} of {cap}'])}")
    return results


def _rows() -> RoutedRows:
    generator = torch.Generator().manual_seed(1)
    return RoutedRows(
        torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().cuda(),
        torch.rand(TOKENS, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].cuda(),
        torch.rand(TOKENS, TOP_K, generator=generator).softmax(dim=1).cuda(),
    )


def _colocated(experts: BareExperts, rows: RoutedRows, wanted: torch.Tensor) -> list[float]:
    wanted.copy_(experts.combined(rows.hidden.clone(), rows.expert_ids, rows.weights))
    # it works in place
    inputs = [rows.hidden.clone() for _ in range(LAYERS)]

    def refill() -> None:
        for hidden in inputs:
            hidden.copy_(rows.hidden)

    turn = itertools.cycle(inputs)
    return _times(
        lambda: experts.combined(next(turn), rows.expert_ids, rows.weights), before=refill
    )


def _asked(
    rows: RoutedRows, transport: NvlinkTransport, plan: StepPlan
) -> Callable[[], torch.Tensor]:
    def layer() -> torch.Tensor:
        parts = []
        for round_ in plan.rounds:
            mine = round_.rows_of(0)
            part = RoutedRows(*(field[mine] for field in rows))
            parts.append(transport.combine(transport.dispatch(part, round_)))
        return torch.cat(parts)

    return layer


def _served(experts: BareExperts, transport: NvlinkTransport, plan: StepPlan) -> Callable[[], None]:
    def layer() -> None:
        for round_ in plan.rounds:
            batch, handle = transport.receive(round_)
            transport.reply(experts.single(batch.hidden, batch.expert_ids), handle)

    return layer


def _times(layer: Callable[[], Any], *, before: Callable[[], Any] = dist.barrier) -> list[float]:
    """Milliseconds of a layer, in each of some runs of several layers on end."""
    times = []
    for _ in range(REPEATS):
        before()
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(LAYERS):
            layer()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / LAYERS)
    return times


def _rates(times: list[float]) -> dict[str, Any]:
    middle = statistics.median(times)
    return {"ms": middle, "tokens_per_s": TOKENS / middle * 1000, "all_ms": times}


if __name__ == "__main__":
    main()
