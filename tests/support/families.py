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


ROWS: dict[str, Callable[[], Any]] = {"minimax": _minimax_m2}
"""The checkpoint's name -> its configuration."""
