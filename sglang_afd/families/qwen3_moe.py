"""Qwen3-MoE: experts at ``model.layers.L.mlp.experts.E.{gate,up,down}_proj``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sglang_afd.families.facts import ExpertTensor, MoeFacts, Shape

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


def tensors(hf_config: Any) -> Iterator[tuple[str, Shape]]:
    """Every tensor of a checkpoint: name and shape, ``[out, in]`` for projections."""
    hidden, vocab = hf_config.hidden_size, hf_config.vocab_size
    head = hf_config.head_dim or hidden // hf_config.num_attention_heads
    query, key = head * hf_config.num_attention_heads, head * hf_config.num_key_value_heads
    moe = facts(hf_config)
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not hf_config.tie_word_embeddings:
        yield "lm_head.weight", (vocab, hidden)
    for layer in range(hf_config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for projection, width in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}.self_attn.{projection}_proj.weight", (width, hidden)
            if hf_config.attention_bias:
                yield f"{prefix}.self_attn.{projection}_proj.bias", (width,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        if layer not in moe.layers:
            yield from _feed_forward(f"{prefix}.mlp", hidden, hf_config.intermediate_size)
            continue
        yield f"{prefix}.mlp.gate.weight", (moe.num_experts, hidden)
        for expert in range(moe.num_experts):
            name = f"{prefix}.mlp.experts.{expert}"
            yield from _feed_forward(name, hidden, moe.intermediate_size)


def _feed_forward(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
