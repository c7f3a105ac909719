"""The embedded model's shape, and writing a Qwen3-MoE checkpoint in the hub's layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_PACKED_EXPERTS = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)")


def qwen3_moe_config(
    *,
    vocab_size: int,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
    top_k: int,
    moe_intermediate_size: int,
    max_position: int,
    dtype: torch.dtype,
    eos_token_id: int,
    pad_token_id: int,
) -> dict[str, Any]:
    """``config.json`` of a ``Qwen3MoeForCausalLM`` whose every layer is sparse, embeddings untied.

    The keys are those of the published Qwen3-MoE checkpoints, so that any reader finds what it
    looks for (``rope_theta`` rather than transformers 5's ``rope_parameters``).
    """
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": eos_token_id,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": moe_intermediate_size * top_k,
        "max_position_embeddings": max_position,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "output_router_logits": False,
        "pad_token_id": pad_token_id,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def embedded_config(eos_token_id: int, pad_token_id: int, vocab_size: int) -> dict[str, Any]:
    """The embedded model: 5.4 M parameters (10.8 MB in bf16), 3.5 M of them in the experts.

    12 experts divide among 1, 2, 3 and 4 FFN ranks, and 4 query and 2 key-value heads between two
    attention-TP ranks. The embeddings are untied, as in the published Qwen3-MoE checkpoints: it
    costs 1 MB and exercises the separate ``lm_head``.
    """
    return qwen3_moe_config(
        vocab_size=vocab_size,
        hidden_size=256,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=12,
        top_k=4,
        moe_intermediate_size=96,
        max_position=4096,
        dtype=torch.bfloat16,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def unpack_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename transformers 5's packed expert weights to one tensor per expert and projection.

    ``gate_up_proj [E, 2I, H]`` becomes ``{e}.gate_proj.weight [I, H]`` and ``{e}.up_proj.weight``,
    ``down_proj [E, H, I]`` becomes ``{e}.down_proj.weight [H, I]``; other tensors are passed on.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        packed = _PACKED_EXPERTS.fullmatch(name)
        if packed is None:
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            prefix = f"{packed['prefix']}.{expert}"
            if packed["part"] == "down_proj":
                out[f"{prefix}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2, dim=0)
                out[f"{prefix}.gate_proj.weight"] = gate
                out[f"{prefix}.up_proj.weight"] = up
    return out


def write(directory: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """Write config, generation config and one ``model.safetensors`` in the config's dtype.

    ``state`` has one tensor per expert and projection (:func:`unpack_experts`).
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_configs(directory, config)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in sorted(state.items())}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_configs(directory: Path, config: dict[str, Any]) -> None:
    """Write ``config.json`` and a ``generation_config.json``: greedy, until a turn ends."""
    generation = {
        "do_sample": False,
        "eos_token_id": sorted({config["eos_token_id"], config["pad_token_id"]}),
        "pad_token_id": config["pad_token_id"],
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
