"""DeepSeek-V2 and V3: latent attention, shared experts, groups of experts, dense first layers.

The shared experts stay in SGLang's model class on A ranks, like all that is not a routed expert.
"""

from __future__ import annotations

from typing import Any

from sglang_afd.families.facts import MoeFacts, UnsupportedModel
from sglang_afd.families.family import (
    ExpertNames,
    Family,
    Tensors,
    decoder,
    feed_forward,
    routed_experts,
)

_EXPERTS = ExpertNames()
_BIASED = "noaux_tc"
_ROUTERS = (
    # scoring_func, topk_method: the rest of config.json says how many groups there are
    ("softmax", "greedy"),
    ("softmax", "group_limited_greedy"),
    ("sigmoid", _BIASED),
)


def _facts(hf_config: Any) -> MoeFacts:
    """Facts of a ``DeepseekV2Config`` or ``DeepseekV3Config``.

    Raises:
        UnsupportedModel: SGLang routes otherwise than the fields say, or leaves a bias out.
    """
    router = (hf_config.scoring_func, hf_config.topk_method)
    if router not in _ROUTERS:
        raise UnsupportedModel(
            f"config.json has scoring_func {router[0]!r} with topk_method {router[1]!r}; served "
            f"are {', '.join(f'{scoring} with {method}' for scoring, method in _ROUTERS)}"
        )
    groups = hf_config.n_group
    if router[1] == "greedy" and groups != 1:
        raise UnsupportedModel(
            f"config.json has n_group {groups} with topk_method 'greedy', where SGLang would "
            f"choose among groups; n_group must be 1"
        )
    if hf_config.attention_bias:
        raise UnsupportedModel("config.json has attention_bias, which SGLang's DeepSeek has not")
    layers = tuple(
        layer
        for layer in range(hf_config.num_hidden_layers)
        if layer >= hf_config.first_k_dense_replace and layer % hf_config.moe_layer_freq == 0
    )
    return MoeFacts(
        layers=layers,
        num_experts=hf_config.n_routed_experts,
        top_k=hf_config.num_experts_per_tok,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.moe_intermediate_size,
    )


def _latent_attention(hf_config: Any, prefix: str) -> Tensors:
    hidden, heads = hf_config.hidden_size, hf_config.num_attention_heads
    nope, rope, value = (
        hf_config.qk_nope_head_dim,
        hf_config.qk_rope_head_dim,
        hf_config.v_head_dim,
    )
    query, rank = heads * (nope + rope), hf_config.q_lora_rank
    if rank is None:
        yield f"{prefix}.q_proj.weight", (query, hidden)
    else:
        yield f"{prefix}.q_a_proj.weight", (rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (rank,)
        yield f"{prefix}.q_b_proj.weight", (query, rank)
    latent = hf_config.kv_lora_rank
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (latent,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + value), latent)
    yield f"{prefix}.o_proj.weight", (hidden, heads * value)


def _tensors(hf_config: Any) -> Tensors:
    facts = _facts(hf_config)
    hidden, experts = facts.hidden_size, facts.num_experts
    shared = facts.intermediate_size * (hf_config.n_shared_experts or 0)

    def layer(index: int, prefix: str) -> Tensors:
        yield from _latent_attention(hf_config, f"{prefix}.self_attn")
        block = f"{prefix}.{_EXPERTS.module}"
        if index not in facts.layers:
            yield from feed_forward(block, hidden, hf_config.intermediate_size)
            return
        yield f"{block}.gate.weight", (experts, hidden)
        if hf_config.topk_method == _BIASED:
            yield f"{block}.gate.e_score_correction_bias", (experts,)
        if shared:
            yield from feed_forward(f"{block}.shared_experts", hidden, shared)
        yield from routed_experts(_EXPERTS, index, facts)

    yield from decoder(hf_config, layer)


FAMILY = Family(
    name="DeepSeek-V2/V3",
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    models="DeepSeek-V2, V2-Lite, V3, R1",
    facts=_facts,
    experts=_EXPERTS,
    tensors=_tensors,
    cpu="FP32: 1A1F, 2A1F, 2A2F, 1A1F with attention TP 2",
    gpu="not run",
)
