"""An F rank loads every tensor of its experts, or names one that the checkpoint lacks."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from sglang_afd import context as context_module
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.upstream.expert_layers import ExpertModel

pytestmark = pytest.mark.unit

LAYERS = (1, 3)
FACTS = MoeFacts(LAYERS, num_experts=4, top_k=2, hidden_size=4, intermediate_size=6)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SUFFIXES = ("weight", "weight_scale_inv")
Loaded = list[tuple[str, str, int]]


@pytest.fixture
def loaded() -> Loaded:
    return []


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, loaded: Loaded) -> ExpertModel:
    """The second of two F ranks: experts 2 and 3; its parameters note what is loaded into them."""
    config = AfdConfig(attention_ranks=1, ffn_ranks=2)
    rank = RankContext(config, 2, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {})
    monkeypatch.setattr(context_module, "_current", rank)
    model = ExpertModel.__new__(ExpertModel)
    nn.Module.__init__(model)
    model.layers = nn.ModuleDict({str(layer): nn.Module() for layer in LAYERS})
    for layer, weight, suffix in product(LAYERS, ("w13", "w2"), SUFFIXES):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.weight_loader = lambda parameter, value, target, *, shard_id, expert_id: (  # type: ignore[attr-defined]
            loaded.append((target, shard_id, expert_id))
        )
        model.layers[str(layer)].register_parameter(f"{weight}_{suffix}", parameter)
    return model


def tensors(*without: str) -> list[tuple[str, Any]]:
    """The expert tensors of a checkpoint and another one, all but those named."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{suffix}"
        for layer, expert, projection, suffix in product(LAYERS, range(4), PROJECTIONS, SUFFIXES)
    ]
    return [(name, None) for name in [*names, "lm_head.weight"] if name not in without]


def test_every_tensor_of_the_ranks_experts_is_loaded_once(
    model: ExpertModel, loaded: Loaded
) -> None:
    model.load_weights(tensors())
    expected = [
        (f"layers.{layer}.{weight}_{suffix}", shard, expert)
        for layer, expert, suffix in product(LAYERS, range(2), SUFFIXES)
        for weight, shard in (("w13", "w1"), ("w13", "w3"), ("w2", "w2"))
    ]
    assert sorted(loaded) == sorted(expected)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("projection", "shard"), [("gate_proj", "w1"), ("down_proj", "w2")])
def test_a_missing_tensor_is_named(
    model: ExpertModel, suffix: str, projection: str, shard: str
) -> None:
    name = f"model.layers.3.mlp.experts.2.{projection}.{suffix}"
    with pytest.raises(
        ValueError,
        match=rf"^FFN rank 1 .* found no {re.escape(name)} \(1 tensors",
    ):
        model.load_weights(tensors(name))


def test_of_many_missing_tensors_the_first_is_named(model: ExpertModel) -> None:
    with pytest.raises(
        ValueError, match=r"layers.1.mlp.experts.2.gate_proj.weight \(24 tensors are"
    ):
        model.load_weights([])


def test_another_ranks_tensors_may_be_missing(model: ExpertModel) -> None:
    model.load_weights([(n, v) for n, v in tensors() if ".experts.0." not in n])


def test_a_tensor_without_a_place_is_named(model: ExpertModel) -> None:
    name = "model.layers.2.mlp.experts.2.up_proj.weight"
    with pytest.raises(ValueError, match=f"has no place for {name}"):
        model.load_weights([*tensors(), (name, None)])
