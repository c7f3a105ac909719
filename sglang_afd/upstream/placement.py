"""SGLang's own balancing of experts (EPLB), over the F ranks."""

from __future__ import annotations

from sglang_afd.config import AfdConfig
from sglang_afd.families import MoeFacts
from sglang_afd.placement import Placement, Table, in_order, read


def placement_of(config: AfdConfig, facts: MoeFacts) -> Placement:
    """Where the deployment's experts lie; the same on every rank.

    Raises:
        PlacementError: the file that should say so does not fit the model.
    """
    layers, experts, replicas = facts.layers, facts.num_experts, config.expert_replicas
    if not config.expert_placement:
        return in_order(layers, experts, replicas)
    owners = len(config.topology.ffn_world)

    def spread(counts: Table) -> Table:
        return _spread(counts, experts + replicas, owners)

    return read(config.expert_placement, layers, experts, replicas, spread)


def _spread(counts: Table, slots: int, owners: int) -> Table:
    """Rows of every expert -> the expert in each slot, so that all owners get about as many."""
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
