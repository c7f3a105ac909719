"""The per-step synchronisation: widened by the plan row, read back as the step plan.

SGLang's ``MLPSyncBatchInfo`` is gathered over all ranks on the CPU, once or more a step, before the
step's forward; the last gather before a forward is the one that counts.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_afd.context import current
from sglang_afd.dispatch.step_plan import PLAN_WIDTH, Path, StepKind, StepPlan
from sglang_afd.upstream.hooks import Hook, Kind

_SYNC = "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo"


def _gather_on_the_cpu(
    info: Any, device: Any, group: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from sglang.srt.runtime_context import get_parallel

    return (info, "cpu", get_parallel().tp_group.cpu_group), kwargs


def _append_row(row: torch.Tensor, info: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    context = current()
    if not info.num_tokens:
        kind = StepKind.IDLE
    else:
        kind = StepKind.EXTEND if info.is_extend_in_batch else StepKind.DECODE
    tokens = info.num_tokens
    if kind is StepKind.DECODE:  # SGLang counts requests here, also where each has several tokens
        tokens *= context.rows_per_request
    # Attention TP shards a DP rank's rows evenly, after padding them to a multiple of its size.
    rows = -(-tokens // context.config.attention_tp)
    return torch.cat([row, row.new_tensor(context.next_row(kind, rows))])


def _append_empty_row(row: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.cat([row, row.new_zeros(PLAN_WIDTH)])


def _read_plan(_: None, info: Any, *args: Any, **kwargs: Any) -> None:
    context = current()
    assert context.caps is not None, "ranks step only after the transport was made"
    assert context.row is not None, "the gather that has just ended began with this rank's row"
    context.plan = plan = StepPlan.from_rows(
        info.tp0_info_cpu[:, -PLAN_WIDTH:].tolist(),
        context.topology,
        context.caps,
        context.rank,
        context.row,
    )
    context.timer.agreed(plan)
    # SGLang lets no rank replay a graph while one extends; here every rank's exchange is its own.
    extends = plan.kinds[context.rank] is StepKind.EXTEND
    info.can_run_decode_cuda_graph = not extends and len(plan.rounds_of(Path.DECODE)) == 1


HOOKS = (
    Hook(
        f"{_SYNC}._get_local_tensor",
        Kind.AFTER,
        _append_row,
        "each rank announces its step id, rows and configuration hash with the sync",
    ),
    Hook(
        f"{_SYNC}._get_fallback_tensor",
        Kind.AFTER,
        _append_empty_row,
        "the row of an inactive rank has the same width",
    ),
    Hook(
        f"{_SYNC}.all_gather",
        Kind.BEFORE,
        _gather_on_the_cpu,
        "without overlap SGLang gathers on the device, where no wait for a peer is bounded",
    ),
    Hook(
        f"{_SYNC}.all_gather",
        Kind.AFTER,
        _read_plan,
        "every rank derives the step plan from the gathered rows, ahead of the forward",
    ),
)
