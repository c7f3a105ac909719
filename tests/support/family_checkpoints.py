"""Seeded checkpoints of the model families in `tests.support.families`.

The configuration comes from transformers' class, the names and shapes of the tensors from the
family's adapter, and what keeps the experts' part as large as the rest is that of
`tests.support.checkpoints`.  Every norm's weight and the router's bias differ between channels, so
that none can be mixed up or lost unseen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from sglang_afd.families import Family, Shape, family_of
from tests.support.checkpoints import (
    LOGIT_SPREAD,
    ROUTER_SPREAD,
    normal,
    write_tokenizer,
    write_weights,
)
from tests.support.families import FUSED, ROWS

LOG_RATE = -3.0  # gated DeltaNet forgets in about 30 tokens
NORM_SPREAD, BIAS_SPREAD = 0.3, 0.1  # the router's scores are spread by about 0.25
SEED, SHARDS = 11, 2


def seeded_family(directory: Path, row: str, *, seed: int = SEED, shards: int = SHARDS) -> Path:
    """Write the checkpoint of `row` into `directory`, in float32, and return it."""
    config = ROWS[row]()
    family = family_of(config.architectures[0])
    config.dtype = torch.float32
    config.save_pretrained(directory)
    text = config.get_text_config()
    shapes = dict(family.tensors(text))
    top_k = family.facts(text).top_k

    def make(name: str) -> torch.Tensor:
        values = normal(seed, name, shapes[name]) * _spread(family, name, shapes[name], top_k)
        queries, _, found = name.partition(".o_proj.")
        if found and shapes.get(f"{queries}.q_proj.weight", (0,))[0] == 2 * shapes[name][1]:
            values *= 2  # the output's gate, which the queries' projection gives too, halves it
        return values + _mean(name)

    experts = fused(family, shapes) if row in FUSED else {}
    alone = set(shapes).difference(*(parts for kept in experts.values() for parts in kept))

    def stored(name: str) -> torch.Tensor:
        if name not in experts:
            return make(name)
        return torch.stack([torch.cat([make(part) for part in parts]) for parts in experts[name]])

    write_weights(directory, {*alone, *experts}, stored, shards)
    write_tokenizer(directory)
    return directory


def fused(family: Family, names: Iterable[str]) -> dict[str, list[list[str]]]:
    """The tensors of all experts of a layer -> for each expert, those that it stands for."""
    found: dict[str, list[list[str]]] = {}
    for name in names:
        tensor = family.expert_tensor(name)
        if tensor is not None and tensor.projection != "w3":
            projections = ("w1", "w3") if tensor.projection == "w1" else ("w2",)
            kind = "gate_up_proj" if len(projections) == 2 else "down_proj"
            parts = [tensor._replace(projection=projection) for projection in projections]
            of_layer = found.setdefault(f"{family.experts.prefix(tensor.layer)}.{kind}", [])
            of_layer.append([family.experts.spell(part) for part in parts])
    return found


def _mean(name: str) -> float:
    """The mean of a tensor's values."""
    if name.endswith(".A_log"):
        return LOG_RATE
    return 1.0 if "norm" in name else 0.0


def _spread(family: Family, name: str, shape: Shape, top_k: int) -> float:
    """The standard deviation of a tensor's values."""
    if "norm" in name:
        return NORM_SPREAD
    if name.endswith("correction_bias"):
        return BIAS_SPREAD
    if name.endswith("embed_tokens.weight"):
        return 1.0
    by_input = 1 / math.sqrt(shape[-1])
    if name == "lm_head.weight":
        return LOGIT_SPREAD * by_input
    if name.endswith(".gate.weight"):
        return ROUTER_SPREAD * by_input
    expert = family.expert_tensor(name)
    if expert is not None and expert.projection == "w2":
        return math.sqrt(top_k) / 0.6 * by_input  # see seeded_qwen3_moe
    return by_input
