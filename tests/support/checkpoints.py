"""Seeded Qwen3-MoE checkpoints whose experts matter.

Weights straight from an initialiser prove nothing about the MoE path: the experts' output is then
tiny beside the residual stream and any routing gives the same tokens. Here every projection keeps
the scale of its input, so each sub-layer adds a vector of about unit size per channel, the router's
logits are spread, and the tokens change when an expert does.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_afd import embedded
from sglang_afd.embedded.checkpoint import qwen3_moe_config, write_configs
from tests.support.planting import Edit, Planting, edits

ROUTER_SPREAD = 1.5  # standard deviation of router logits: neither even nor one expert for all
LOGIT_SPREAD = 3.0  # standard deviation of logits: the best token leads by about one
EMBEDDED_VOCAB = 2048  # entries of the embedded model's tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def seeded_qwen3_moe(
    directory: Path,
    *,
    seed: int,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    experts: int = 8,
    top_k: int = 2,
    moe_intermediate: int = 64,
    vocab: int = EMBEDDED_VOCAB,
    max_position: int = 4096,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    router_spread: float = ROUTER_SPREAD,
    logit_spread: float = LOGIT_SPREAD,
    attention_scale: float = 1.0,
    expert_scale: float = 1.0,
    planting: Planting | None = None,
) -> Path:
    """Write a checkpoint into ``directory`` and return it.

    A tensor's values depend on ``seed``, its name and its shape alone, so checkpoints that differ
    in ``layers`` or ``experts`` share the rest. With ``shards`` > 1, tensors are dealt in turn to
    that many files and an index is written. The embedded model's tokenizer is copied if ``vocab``
    covers it; without it a server needs ``--skip-tokenizer-init``.

    ``attention_scale`` and ``expert_scale`` multiply what a sub-layer adds to the residual stream.
    With ``planting`` some tensors depend on others too; see `tests.support.planting`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = qwen3_moe_config(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        experts=experts,
        top_k=top_k,
        moe_intermediate_size=moe_intermediate,
        max_position=max_position,
        dtype=dtype,
        eos_token_id=2,
        pad_token_id=0,
    )
    write_configs(directory, config)
    scales = _scales(config, router_spread, logit_spread, attention_scale, expert_scale)
    changes: dict[str, Edit] = {}
    if planting is not None:
        changes = edits(config, planting, logit_spread=logit_spread, normal=partial(normal, seed))
    write_weights(directory, scales, lambda n: _tensor(n, *scales[n], seed, dtype, changes), shards)
    if vocab >= EMBEDDED_VOCAB:
        write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Give a checkpoint the embedded model's tokenizer."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(embedded.path() / name, directory / name)


def _scales(
    config: dict,
    router_spread: float,
    logit_spread: float,
    attention_scale: float,
    expert_scale: float,
) -> dict[str, tuple[tuple[int, ...], float]]:
    """Shape and standard deviation of every tensor; 0 means a norm's constant ones."""
    h, inter = config["hidden_size"], config["moe_intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    vocab, k = config["vocab_size"], config["num_experts_per_tok"]
    norm, by_hidden = 0.0, 1 / math.sqrt(h)
    out: dict[str, tuple[tuple[int, ...], float]] = {
        "model.embed_tokens.weight": ((vocab, h), 1.0),
        "model.norm.weight": ((h,), norm),
        "lm_head.weight": ((vocab, h), logit_spread * by_hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        out |= {
            f"{layer}.input_layernorm.weight": ((h,), norm),
            f"{layer}.post_attention_layernorm.weight": ((h,), norm),
            f"{layer}.self_attn.q_norm.weight": ((config["head_dim"],), norm),
            f"{layer}.self_attn.k_norm.weight": ((config["head_dim"],), norm),
            f"{layer}.self_attn.q_proj.weight": ((q, h), by_hidden),
            f"{layer}.self_attn.k_proj.weight": ((kv, h), by_hidden),
            f"{layer}.self_attn.v_proj.weight": ((kv, h), by_hidden),
            f"{layer}.self_attn.o_proj.weight": ((h, q), attention_scale / math.sqrt(q)),
            f"{layer}.mlp.gate.weight": ((config["num_experts"], h), router_spread * by_hidden),
        }
        # silu(g) * u of two unit normals has a standard deviation of about 0.6, and averaging k
        # independent experts divides by sqrt(k): undo both, so that the sum is of unit size.
        down = expert_scale * math.sqrt(k) / (0.6 * math.sqrt(inter))
        for expert in range(config["num_experts"]):
            prefix = f"{layer}.mlp.experts.{expert}"
            out |= {
                f"{prefix}.gate_proj.weight": ((inter, h), by_hidden),
                f"{prefix}.up_proj.weight": ((inter, h), by_hidden),
                f"{prefix}.down_proj.weight": ((h, inter), down),
            }
    return out


def _tensor(
    name: str,
    shape: tuple[int, ...],
    scale: float,
    seed: int,
    dtype: torch.dtype,
    changes: dict[str, Edit],
) -> torch.Tensor:
    if scale == 0:
        return torch.ones(shape, dtype=dtype)
    tensor = normal(seed, name, shape) * scale
    return changes.get(name, lambda same: same)(tensor).to(dtype)


def normal(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Unit normal values that depend on the arguments alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator)


def write_weights(
    directory: Path, names: Iterable[str], make: Callable[[str], torch.Tensor], shards: int
) -> None:
    """Write the tensors ``make(name)``, dealt in turn to `shards` files, with an index if there
    are several; one file at a time, so that memory holds one shard."""
    names = sorted(names)
    weight_map: dict[str, str] = {}
    size = 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        if shards == 1:
            file = "model.safetensors"
        tensors = {name: make(name) for name in names[shard::shards]}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(t.nbytes for t in tensors.values())
    if shards > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
