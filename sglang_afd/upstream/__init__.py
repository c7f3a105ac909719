"""The only package (with `sglang_afd.platform`) that names SGLang internals: one module per
upstream subsystem, each a list of small hooks with the reason for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_afd.config import AfdConfig
from sglang_afd.topology import Mode

if TYPE_CHECKING:
    from sglang_afd.upstream.hooks import Hook


def all_hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Every hook of a deployment; processes that lack a role's work never reach its hooks."""
    from sglang_afd.upstream import (
        arguments,
        attention_splits,
        cad_ranks,
        ending,
        endpoints,
        expert_layers,
        graphs,
        health,
        holdings,
        idle,
        in_flight,
        inputs,
        lanes,
        leftovers,
        lm_head,
        loading,
        loads,
        memory,
        peers,
        placement,
        processes,
        ranks,
        refusals,
        routing,
        simulated,
        speculation,
        step_sync,
        telemetry,
        text_only,
        weight_update,
    )

    return (
        *arguments.hooks(config),
        *processes.hooks(config),
        *routing.hooks(config),
        *loads.hooks(config),
        *peers.hooks(config),
        *(ranks if config.mode is Mode.AFD else cad_ranks).hooks(config),
        *step_sync.HOOKS,
        *expert_layers.HOOKS,
        *graphs.HOOKS,
        *attention_splits.HOOKS,
        *lm_head.HOOKS,
        *speculation.hooks(config),
        *simulated.hooks(config),
        *loading.HOOKS,
        *memory.HOOKS,
        *holdings.HOOKS,
        *telemetry.hooks(),
        *endpoints.HOOKS,
        *lanes.hooks(config),
        *idle.HOOKS,
        *refusals.HOOKS,
        *inputs.HOOKS,
        *text_only.HOOKS,
        *ending.HOOKS,
        *health.hooks(config),
        *in_flight.HOOKS,
        *weight_update.hooks(config),
        *placement.HOOKS,
        *leftovers.HOOKS,
    )
