"""MiniMax-M2: sigmoid router with a correction bias, QK norm over all heads, no dense layer."""

from __future__ import annotations

from typing import Any

from sglang_afd.families.facts import MoeFacts, require
from sglang_afd.families.family import (
    ExpertNames,
    Family,
    Tensors,
    attention_widths,
    decoder,
    grouped_attention,
    routed_experts,
)

_EXPERTS = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
_REQUIRED = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"}
"""transformers' class has no such fields and always does what they say.  SGLang does it only where
config.json says so, as the published ones do, and would answer nonsense without."""


def _facts(hf_config: Any) -> MoeFacts:
    """Facts of a ``MiniMaxM2Config``; `intermediate_size` is the width of one expert.

    Raises:
        UnsupportedModel: a field that SGLang goes by is not as in the published checkpoints.
    """
    for name, value in _REQUIRED.items():
        require("MiniMax-M2", name, getattr(hf_config, name), value)
    _ = hf_config.rotary_dim  # without it SGLang rotates whole heads
    return MoeFacts(
        layers=tuple(range(hf_config.num_hidden_layers)),
        num_experts=hf_config.num_local_experts,
        top_k=hf_config.num_experts_per_tok,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
    )


def _tensors(hf_config: Any) -> Tensors:
    facts = _facts(hf_config)
    query, key = attention_widths(hf_config)

    def layer(index: int, prefix: str) -> Tensors:
        yield from grouped_attention(hf_config, prefix)
        yield f"{prefix}.self_attn.q_norm.weight", (query,)
        yield f"{prefix}.self_attn.k_norm.weight", (key,)
        block = f"{prefix}.{_EXPERTS.module}"
        yield f"{block}.gate.weight", (facts.num_experts, facts.hidden_size)
        yield f"{block}.e_score_correction_bias", (facts.num_experts,)
        yield from routed_experts(_EXPERTS, index, facts)

    yield from decoder(hf_config, layer)


FAMILY = Family(
    name="MiniMax-M2",
    architectures=("MiniMaxM2ForCausalLM",),
    models="MiniMax-M2, MiniMax-M2.5",
    facts=_facts,
    experts=_EXPERTS,
    tensors=_tensors,
    cpu="FP32: 1A1F, 2A1F, 2A2F, 1A1F with attention TP 2",
    gpu="not run",
)
