"""GLM-4.5-MoE: sigmoid router with groups and a bias, shared experts, dense first layers.

The shared experts stay in SGLang's model class on A ranks, like all that is not a routed expert.
"""

from __future__ import annotations

from typing import Any

from sglang_afd.families.facts import MoeFacts
from sglang_afd.families.family import (
    ExpertNames,
    Family,
    Tensors,
    attention_widths,
    decoder,
    feed_forward,
    grouped_attention,
    routed_experts,
)

_EXPERTS = ExpertNames()


def _facts(hf_config: Any) -> MoeFacts:
    """Facts of a ``Glm4MoeConfig``: the first layers are dense."""
    return MoeFacts(
        layers=tuple(range(hf_config.first_k_dense_replace, hf_config.num_hidden_layers)),
        num_experts=hf_config.n_routed_experts,
        top_k=hf_config.num_experts_per_tok,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.moe_intermediate_size,
    )


def _tensors(hf_config: Any) -> Tensors:
    facts = _facts(hf_config)
    hidden, experts = facts.hidden_size, facts.num_experts
    query, _ = attention_widths(hf_config)
    head = (query // hf_config.num_attention_heads,)
    shared = facts.intermediate_size * (hf_config.n_shared_experts or 0)

    def layer(index: int, prefix: str) -> Tensors:
        yield from grouped_attention(hf_config, prefix, bias=hf_config.attention_bias)
        if hf_config.use_qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", head
            yield f"{prefix}.self_attn.k_norm.weight", head
        block = f"{prefix}.{_EXPERTS.module}"
        if index not in facts.layers:
            yield from feed_forward(block, hidden, hf_config.intermediate_size)
            return
        yield f"{block}.gate.weight", (experts, hidden)
        yield f"{block}.gate.e_score_correction_bias", (experts,)
        if shared:
            yield from feed_forward(f"{block}.shared_experts", hidden, shared)
        yield from routed_experts(_EXPERTS, index, facts)

    yield from decoder(hf_config, layer)


FAMILY = Family(
    name="GLM-4.5-MoE",
    architectures=("Glm4MoeForCausalLM",),
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    facts=_facts,
    experts=_EXPERTS,
    tensors=_tensors,
    cpu="FP32: 1A1F, 2A1F, 2A2F, 1A1F with attention TP 2",
    gpu="not run",
)
