"""Qwen3-MoE: experts at ``model.layers.L.mlp.experts.E.{gate,up,down}_proj``."""

from __future__ import annotations

import re
from typing import Any

from sglang_afd.families.facts import ExpertTensor, MoeFacts

_NAME = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)"
)
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def facts(hf_config: Any) -> MoeFacts:
    """Facts of a ``Qwen3MoeConfig``: layers in `mlp_only_layers` or off the step are dense."""
    layers = tuple(
        layer
        for layer in range(hf_config.num_hidden_layers)
        if layer not in (hf_config.mlp_only_layers or ())
        and hf_config.num_experts > 0
        and (layer + 1) % hf_config.decoder_sparse_step == 0
    )
    return MoeFacts(
        layers=layers,
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.moe_intermediate_size,
    )


def expert_tensor(name: str) -> ExpertTensor | None:
    """The expert tensor that a checkpoint name stands for, or None."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, expert, projection, suffix = match.groups()
    return ExpertTensor(int(layer), int(expert), _PROJECTIONS[projection], suffix)
