"""The FP8 checkpoints that benchmarks run: their values, and the layout that SGLang reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.fp8 import BLOCK, quantise, quantise_checkpoint
from tests.support.seeds import fresh_seed

pytestmark = pytest.mark.unit


def some_weight(rows: int, columns: int) -> torch.Tensor:
    """Blocks of very different magnitudes, one of them all zero."""
    generator = torch.Generator().manual_seed(fresh_seed())
    weight = torch.randn(rows, columns, generator=generator)
    blocks = (rows // BLOCK, columns // BLOCK)
    magnitudes = 10.0 ** torch.randint(-6, 4, blocks, generator=generator).float()
    magnitudes[0, 0] = 0
    return weight * spread(magnitudes)


def spread(scale: torch.Tensor) -> torch.Tensor:
    """[N/128, K/128] -> [N, K], every value over its block."""
    return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def assert_within_fp8(weight: torch.Tensor, quantised: torch.Tensor, scale: torch.Tensor) -> None:
    """e4m3 has 3 stored mantissa bits, and steps of 2**-9 below its smallest normal number."""
    error = (quantised.float() * spread(scale) - weight).abs()
    bound = torch.maximum(weight.abs() * 2**-4, spread(scale) * 2**-10)
    assert (error <= bound * (1 + 1e-5)).all(), (error - bound).max()


def test_dequantised_blocks_are_within_fp8_error() -> None:
    weight = some_weight(2 * BLOCK, 5 * BLOCK)
    quantised, scale = quantise(weight)
    assert (quantised.shape, quantised.dtype) == (weight.shape, torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((2, 5), torch.float32)
    assert_within_fp8(weight, quantised, scale)


def test_every_block_uses_the_whole_range() -> None:
    quantised, scale = quantise(some_weight(3 * BLOCK, 2 * BLOCK))
    blocks = quantised.float().view(3, BLOCK, 2, BLOCK).abs().amax(dim=(1, 3))
    assert blocks[0, 0] == 0 and (blocks.flatten()[1:] == 448).all()
    assert (scale > 0).all()


@pytest.mark.upstream
def test_sglang_reads_the_same_values() -> None:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    weight = some_weight(2 * BLOCK, 3 * BLOCK)
    quantised, scale = quantise(weight)
    read = block_quant_dequant(quantised, scale, [BLOCK, BLOCK], torch.float32)
    torch.testing.assert_close(read, quantised.float() * spread(scale), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(BLOCK, BLOCK + 1), (64, BLOCK)])
def test_uneven_weights_are_refused_by_size(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{shape[0]} x {shape[1]} does not divide"):
        quantise(torch.zeros(shape))


def test_a_checkpoint_keeps_what_is_not_a_linear_weight(tmp_path: Path) -> None:
    layer, source = "model.layers.0.", tmp_path / "bf16"
    linear = [
        f"{layer}mlp.experts.1.gate_proj.weight",
        f"{layer}mlp.experts.1.down_proj.weight",
        f"{layer}self_attn.q_proj.weight",
    ]
    kept = ["model.embed_tokens.weight", f"{layer}mlp.gate.weight", "lm_head.weight"]
    norms = ["model.norm.weight", f"{layer}self_attn.q_norm.weight"]
    weights = {name: some_weight(BLOCK, 2 * BLOCK).bfloat16() + 0.5 for name in linear + kept}
    weights |= {name: torch.ones(BLOCK).bfloat16() for name in norms}
    source.mkdir()
    names = list(weights)
    for index in range(2):  # two shards
        shard = {name: weights[name] for name in names[index::2]}
        save_file(shard, source / f"model-{index + 1:05}-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "config.json").write_text(json.dumps({"hidden_size": 256}))
    (source / "tokenizer.json").write_text('{"a": 1}')

    target = quantise_checkpoint(source, tmp_path / "fp8")

    written = load_file(target / "model.safetensors")
    assert set(written) == {*weights, *(f"{name}_scale_inv" for name in linear)}
    for name in kept + norms:
        assert torch.equal(written[name], weights[name]), name
    for name in linear:
        scale = written[f"{name}_scale_inv"]
        assert written[name].dtype == torch.float8_e4m3fn and scale.shape == (1, 2)
        assert_within_fp8(weights[name].float(), written[name], scale)
    config = json.loads((target / "config.json").read_text())
    assert config["hidden_size"] == 256
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
