"""Model families that are tested with a small seeded checkpoint of their own: a row each.

Qwen3-MoE has checkpoints of its own, see `tests.support.checkpoints`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 2048,  # of the embedded model's tokenizer
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _minimax_m2() -> Any:
    from transformers import MiniMaxM2Config

    return MiniMaxM2Config(
        **_SIZES,
        architectures=["MiniMaxM2ForCausalLM"],
        intermediate_size=64,
        head_dim=64,
        rotary_dim=32,
        num_local_experts=8,
        # of the published config.json, for SGLang; transformers' class takes them as given
        scoring_func="sigmoid",
        use_qk_norm=True,
        qk_norm_type="per_layer",
        use_routing_bias=True,
    )


_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "rope_interleave": True,
}


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_LATENT,
        architectures=["DeepseekV2ForCausalLM"],
        q_lora_rank=None,
        n_routed_experts=8,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=4.0,
    )


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_LATENT,
        architectures=["DeepseekV3ForCausalLM"],
        q_lora_rank=64,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


def _glm4() -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **_SIZES,
        architectures=["Glm4MoeForCausalLM"],
        head_dim=64,
        attention_bias=True,
        use_qk_norm=True,
        intermediate_size=192,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )


def _qwen3_5() -> Any:
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(
        **{**_SIZES, "num_hidden_layers": 5},
        architectures=["Qwen3_5MoeForCausalLM"],
        full_attention_interval=4,
        layer_types=[*["linear_attention"] * 3, "full_attention", "linear_attention"],
        head_dim=64,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_num_value_heads=4,
        linear_value_head_dim=32,
        num_experts=8,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        # of the published config.json, for this size of heads
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
    )


def _qwen3_5_vision() -> Any:
    from transformers import Qwen3_5MoeConfig

    return Qwen3_5MoeConfig(
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        text_config=_qwen3_5().to_dict(),
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 128},
        eos_token_id=_SIZES["eos_token_id"],
    )


ROWS: dict[str, Callable[[], Any]] = {
    "minimax": _minimax_m2,
    "deepseek-v2": _deepseek_v2,
    "deepseek-v3": _deepseek_v3,
    "glm4": _glm4,
    "qwen3.5": _qwen3_5,
    "qwen3.5-vision": _qwen3_5_vision,
}
"""The checkpoint's name -> its configuration."""
FUSED = WRAPPED = ("qwen3.5-vision",)
"""Those with one tensor for all experts of a layer, and those that SGLang without AFD would serve
with the rest of the model, of which they have nothing."""


def language_model(row: str) -> Any:
    """The configuration of what is served of a row's checkpoint."""
    return ROWS[row]().get_text_config()
