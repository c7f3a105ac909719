"""Qwen3-MoE: softmax router, QK norm over a head, dense layers where the config says so."""

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


def _tensors(hf_config: Any) -> Tensors:
    facts, hidden = _facts(hf_config), hf_config.hidden_size
    query, _ = attention_widths(hf_config)
    head = (query // hf_config.num_attention_heads,)

    def layer(index: int, prefix: str) -> Tensors:
        yield from grouped_attention(hf_config, prefix, bias=hf_config.attention_bias)
        yield f"{prefix}.self_attn.q_norm.weight", head
        yield f"{prefix}.self_attn.k_norm.weight", head
        if index in facts.layers:
            yield f"{prefix}.mlp.gate.weight", (facts.num_experts, hidden)
            yield from routed_experts(_EXPERTS, index, facts)
        else:
            yield from feed_forward(f"{prefix}.mlp", hidden, hf_config.intermediate_size)

    yield from decoder(hf_config, layer)


FAMILY = Family(
    name="Qwen3-MoE",
    architectures=("Qwen3MoeForCausalLM",),
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    facts=_facts,
    experts=_EXPERTS,
    tensors=_tensors,
    cpu="FP32: 1A1F, 2A1F, 2A2F, 3A1F, 1A1F with attention TP 2",
    gpu="two H200s, BF16 and FP8: 1A1F on deepep and nvlink; nvlink in BF16 with 1 to 3 lanes",
)
