"""Quantise a Qwen3-MoE checkpoint to FP8 with 128 x 128 blocks, in the published layout.

Linear weights of attention and experts become ``float8_e4m3fn`` with a float32 ``weight_scale_inv``
per block; embeddings, norms, router and lm_head stay as they are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

BLOCK = 128
_KEPT = ("embed_tokens", "norm", "mlp.gate.", "lm_head")


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] (multiples of 128) -> FP8 [N, K] and scales [N/128, K/128]; w = fp8 * scale."""
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"{rows} x {columns} does not divide into blocks of {BLOCK}")
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / limit
    quantised = (blocks / scale[:, None, :, None]).clamp(-limit, limit)
    return quantised.view(rows, columns).to(torch.float8_e4m3fn), scale


def quantise_checkpoint(source: Path, target: Path) -> Path:
    """Write the FP8 form of checkpoint `source` into `target` and return it."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 (safe_open is no mapping)
                weight = checkpoint.get_tensor(name)
                if weight.dim() != 2 or any(part in name for part in _KEPT):
                    tensors[name] = weight
                    continue
                tensors[name], tensors[f"{name}_scale_inv"] = quantise(weight)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
