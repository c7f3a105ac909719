"""Qwen3.5-MoE: three layers of gated DeltaNet to one of full attention, a gated shared expert.

The convolution's and the recurrence's states, and the shared expert, are the model class's own, on
A ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_afd.families.facts import MoeFacts, UnsupportedModel, require
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

_FULL, _LINEAR = "full_attention", "linear_attention"
_REQUIRED = {"attention_bias": False, "attn_output_gate": True, "norm_topk_prob": True}
"""transformers' class reads only the first; SGLang's the others."""


def _facts(hf_config: Any) -> MoeFacts:
    """Facts of a ``Qwen3_5MoeTextConfig``: every layer has experts.

    Raises:
        UnsupportedModel: SGLang and transformers would not build the same model of the fields.
    """
    for name, value in _REQUIRED.items():
        require("Qwen3.5-MoE", name, getattr(hf_config, name, value), value)
    if not hf_config.shared_expert_intermediate_size:
        raise UnsupportedModel(
            "config.json has shared_expert_intermediate_size 0, and Qwen3.5-MoE is served with a "
            "shared expert alone"
        )
    _layer_types(hf_config)
    return MoeFacts(
        layers=tuple(range(hf_config.num_hidden_layers)),
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.moe_intermediate_size,
    )


def _layer_types(hf_config: Any) -> list[str]:
    """The attention of each layer; SGLang goes by the interval, transformers by the list."""
    interval = hf_config.full_attention_interval
    types = [
        _LINEAR if (layer + 1) % interval else _FULL for layer in range(hf_config.num_hidden_layers)
    ]
    if (getattr(hf_config, "layer_types", None) or types) != types:
        raise UnsupportedModel(
            f"config.json has layer_types that are not those of full_attention_interval {interval}"
        )
    return types


def _delta_net(hf_config: Any, prefix: str) -> Tensors:
    hidden, heads = hf_config.hidden_size, hf_config.linear_num_value_heads
    value = heads * hf_config.linear_value_head_dim
    mixed = value + 2 * hf_config.linear_num_key_heads * hf_config.linear_key_head_dim
    yield f"{prefix}.conv1d.weight", (mixed, 1, hf_config.linear_conv_kernel_dim)
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.in_proj_qkv.weight", (mixed, hidden)
    yield f"{prefix}.in_proj_z.weight", (value, hidden)
    yield f"{prefix}.in_proj_b.weight", (heads, hidden)
    yield f"{prefix}.in_proj_a.weight", (heads, hidden)
    yield f"{prefix}.norm.weight", (hf_config.linear_value_head_dim,)
    yield f"{prefix}.out_proj.weight", (hidden, value)


def tensors(hf_config: Any, names: ExpertNames) -> Tensors:
    """All tensors of a checkpoint of the language model, whose experts are called `names`."""
    facts, types = _facts(hf_config), _layer_types(hf_config)
    hidden, shared = facts.hidden_size, hf_config.shared_expert_intermediate_size
    query, _ = attention_widths(hf_config)
    head = (query // hf_config.num_attention_heads,)

    def layer(index: int, prefix: str) -> Tensors:
        if types[index] == _LINEAR:
            yield from _delta_net(hf_config, f"{prefix}.linear_attn")
        else:
            yield from grouped_attention(hf_config, prefix, gated=True)
            yield f"{prefix}.self_attn.q_norm.weight", head
            yield f"{prefix}.self_attn.k_norm.weight", head
        block = f"{prefix}.{names.module}"
        yield f"{block}.gate.weight", (facts.num_experts, hidden)
        yield f"{block}.shared_expert_gate.weight", (1, hidden)
        yield from feed_forward(f"{block}.shared_expert", hidden, shared)
        yield from routed_experts(names, index, facts)

    yield from decoder(hf_config, layer, names.stem)


_EXPERTS = ExpertNames(fused=True)

FAMILY = Family(
    name="Qwen3.5-MoE, text",
    architectures=("Qwen3_5MoeForCausalLM",),
    models="checkpoints of the language model alone",
    facts=_facts,
    experts=_EXPERTS,
    tensors=partial(tensors, names=_EXPERTS),
    cpu="FP32: 1A1F, 2A1F, 2A2F, 1A1F with attention TP 2",
    gpu="not run",
    recurrent=("linear_attn.conv1d.weight", "linear_attn.A_log", "linear_attn.dt_bias"),
    unread=("mtp.",),
)
