"""Where experts lie: read when a rank starts, and changed while it serves.

A change goes the way of a weight update: every rank of both roles is told between two steps, F
ranks read the experts of their slots again, and all take the new placement, or none does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sglang_afd.config import AfdConfig
from sglang_afd.context import current
from sglang_afd.families import MoeFacts
from sglang_afd.placement import Placement, PlacementError, Table, fitting, in_order, read
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.weight_update import (
    PLACEMENT,
    UNDER_WAY,
    checkpoint_at,
    placing,
    updating,
)


def placement_of(config: AfdConfig, facts: MoeFacts) -> Placement:
    """Where the deployment's experts lie at first; the same on every rank.

    Raises:
        PlacementError: the file that should say so does not fit the model.
    """
    layers, experts, replicas = facts.layers, facts.num_experts, config.expert_replicas
    if not config.expert_placement:
        return in_order(layers, experts, replicas)
    return read(config.expert_placement, layers, experts, replicas, _spread_over(config, facts))


async def place_anew(manager: Any, table: dict[str, Any]) -> str | None:
    """In the process that serves HTTP: have all ranks place experts by `table`.

    Requests that run keep what they have, and go on afterwards.

    Returns:
        why that was not done; None: it is.
    """
    from sglang.srt.managers.io_struct import (
        ContinueGenerationReqInput,
        PauseGenerationReqInput,
        UpdateWeightFromDiskReqInput,
    )

    config = AfdConfig.from_environment()
    assert config is not None, "the address is one of a deployment"
    if not (config.expert_replicas or config.expert_placement):
        return "experts lie in order; start with --afd-expert-replicas or --afd-expert-placement"
    path = manager.config_value("model_path")
    facts = (await asyncio.to_thread(checkpoint_at, manager, path)).moe_facts()
    try:
        fitting(table, "the table", facts.layers, facts.num_experts, config.expert_replicas, None)
    except PlacementError as error:
        return str(error)
    if updating(manager).locked():
        return UNDER_WAY
    async with updating(manager), placing(manager):
        paused = manager.is_pause
        if not paused:
            await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        try:
            success, message, _ = await manager.update_weights_from_disk(
                UpdateWeightFromDiskReqInput(
                    model_path=path, flush_cache=False, manifest={PLACEMENT: table}
                )
            )
        finally:
            if not paused:
                await manager.continue_generation(ContinueGenerationReqInput())
    return None if success else message


def _place(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    table = (request.manifest or {}).get(PLACEMENT)
    if table is None:
        return original(updater, request)
    context = current()
    facts, config = context.facts, context.config
    try:
        context.next_placement = fitting(
            table,
            "the table",
            facts.layers,
            facts.num_experts,
            config.expert_replicas,
            _spread_over(config, facts),
        )
    except PlacementError as error:  # the same on every rank
        return UpdateWeightFromDiskReqOutput(False, str(error), 0)
    try:
        return original(updater, request)
    finally:
        context.next_placement = None


def _spread_over(config: AfdConfig, facts: MoeFacts) -> Callable[[Table], Table]:
    """SGLang's balancer over the F ranks: counts -> slots of which all ranks get about as many."""
    owners = len(config.emulation.whole.ffn_world)
    slots = facts.num_experts + config.expert_replicas

    def spread(counts: Table) -> Table:
        import torch
        from sglang.srt.eplb.eplb_algorithms import EplbAlgorithm, rebalance_experts

        found, _, _ = rebalance_experts(
            tokens_per_expert=torch.tensor(counts, dtype=torch.float32).unsqueeze(0),
            num_physical_experts=slots,
            num_local_physical_experts=slots // owners,
            num_groups=1,
            num_nodes=1,
            algorithm=EplbAlgorithm.deepseek,
        )
        return found.tolist()

    return spread


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_disk",
        Kind.AROUND,
        _place,
        "experts are placed anew as weights are: between two steps, on all ranks or on none",
    ),
)
