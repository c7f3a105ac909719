"""Seeded checkpoints are worth testing with: their experts matter, and a seed fixes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sglang_afd.embedded.evaluate import expert_use, greedy, load, zero_experts
from tests.support.checkpoints import seeded_qwen3_moe

pytestmark = pytest.mark.unit

PROMPT = [300, 41, 1207, 88, 960]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    out = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            out |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - no iterator
    return out


def test_zeroing_the_experts_changes_the_greedy_tokens(tmp_path: Path) -> None:
    model = load(seeded_qwen3_moe(tmp_path, seed=7), "cpu")
    with_experts, _ = greedy(model, PROMPT, 16)
    assert len(set(with_experts)) > 4  # no loop
    zero_experts(model)
    without, _ = greedy(model, PROMPT, 16)
    assert with_experts[0] != without[0]


def test_expert_output_is_of_the_residual_streams_size_and_all_are_used(tmp_path: Path) -> None:
    model = load(seeded_qwen3_moe(tmp_path, seed=8), "cpu")
    residual: list[float] = []
    expert_output: list[float] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _m, args: residual.append(args[0].std().item()))
        layer.mlp.register_forward_hook(lambda _m, _i, out: expert_output.append(out.std().item()))
    counts = expert_use(model, list(range(100, 356)))
    ratios = [e / r for e, r in zip(expert_output, residual, strict=True)]
    assert len(ratios) == 2
    assert all(0.4 < ratio < 2.0 for ratio in ratios), ratios
    assert min(min(layer) for layer in counts) > 0


def test_a_seed_fixes_the_weights_and_another_changes_them(tmp_path: Path) -> None:
    one = tensors(seeded_qwen3_moe(tmp_path / "one", seed=1, layers=1))
    same = tensors(seeded_qwen3_moe(tmp_path / "same", seed=1, layers=1))
    other = tensors(seeded_qwen3_moe(tmp_path / "other", seed=2, layers=1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    one = tensors(seeded_qwen3_moe(tmp_path / "one", seed=1, dtype=torch.bfloat16))
    directory = seeded_qwen3_moe(tmp_path / "three", seed=1, dtype=torch.bfloat16, shards=3)
    three = tensors(directory)
    assert three.keys() == one.keys()
    assert all(torch.equal(one[name], three[name]) for name in one)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == one.keys()
    assert len(set(index["weight_map"].values())) == 3
    assert load(directory, "cpu").config.num_hidden_layers == 2
