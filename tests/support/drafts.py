"""Seeded EAGLE-3 drafts that are right now and then.

A target that adds little to the embedding of its last token has the next token mostly of that
embedding alone.  The draft made here computes just that: its attention picks the token itself,
takes its embedding as value and leaves out what the layer before passed on.  So some of its tokens
are accepted and some are not, which random weights would never show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import normal

SHARPNESS = 2.0  # of the attention to the token itself: it then has almost all of the weight
TARGET: dict[str, Any] = {
    "seed": 13,
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "experts": 8,
    "top_k": 2,
    "attention_scale": 0.25,
    "expert_scale": 0.25,
}
"""Dimensions of a `seeded_qwen3_moe` checkpoint for which the draft is right now and then."""
WORDS = 1600
"""Of the target's vocabulary, known to the draft."""
AUX_LAYERS = (0, 1, 2)


def draft_config(target: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """config.json of a draft for the target with config `target`; None removes a field."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 2 * target["hidden_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": WORDS,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
            "use_aux_hidden_state": True,
        },
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def seeded_draft(directory: Path, target: Path, *, seed: int = 3) -> Path:
    """Write a draft for the checkpoint `target` into `directory` and return it.

    The target's keys must be as wide as its hidden states.
    """
    config = draft_config(json.loads((target / "config.json").read_text()))
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert kv_heads * head == hidden, "a value holds a whole embedding"
    words = torch.randperm(config["vocab_size"], generator=torch.Generator().manual_seed(seed))
    words = words[:WORDS].sort().values
    has = torch.zeros(config["vocab_size"], dtype=torch.bool)
    has[words] = True
    identity, nothing = torch.eye(hidden), torch.zeros(hidden, hidden)
    embedding_only = torch.cat([identity, nothing], dim=1)
    share = heads // kv_heads  # query heads that read one key head; the first of them is used
    query = torch.zeros(heads * head, 2 * hidden)
    out = torch.zeros(hidden, heads * head)
    for group in range(kv_heads):
        mine = slice(group * head, (group + 1) * head)
        first = slice(group * share * head, (group * share + 1) * head)
        query[first] = SHARPNESS * embedding_only[mine]
        out[mine, first] = torch.eye(head)
    wide = len(AUX_LAYERS) * hidden
    inner = config["intermediate_size"]
    tensors = {
        "fc.weight": normal(seed, "fc.weight", (hidden, wide)) / math.sqrt(wide),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": _lm_head(target)[words].float().clone(),
        "d2t": words - torch.arange(WORDS),
        "t2d": has,
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": query,
        "midlayer.self_attn.k_proj.weight": embedding_only.clone(),
        "midlayer.self_attn.v_proj.weight": torch.cat([identity, -identity], dim=1),
        "midlayer.self_attn.o_proj.weight": out,
        "midlayer.mlp.gate_proj.weight": torch.zeros(inner, hidden),
        "midlayer.mlp.up_proj.weight": torch.zeros(inner, hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, inner),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def _lm_head(target: Path) -> torch.Tensor:
    for file in sorted(target.glob("*.safetensors")):
        tensors = load_file(file)
        if "lm_head.weight" in tensors:
            return tensors["lm_head.weight"]
    raise KeyError("the target has no lm_head.weight")
