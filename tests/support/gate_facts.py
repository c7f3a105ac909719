"""Facts for gate tests: checkpoints that are a config.json, command lines, made-up machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_afd.checkpoint import read_checkpoint
from sglang_afd.facts import Facts
from sglang_afd.flags import parse
from sglang_afd.machine import Gpu, Machine
from sglang_afd.running import free_port

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
H200 = Gpu("H200", (9, 0))
GPUS = Machine((H200,) * 8, frozenset({"deep_ep", "deep_gemm"}))
ONE_OF_EACH = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")


def write_model(directory: Path, weights: bool = True, **changes: Any) -> Path:
    """A checkpoint directory: config.json, where a change to None removes a field."""
    directory.mkdir(exist_ok=True)
    config = {key: value for key, value in {**MODEL, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    if weights:
        (directory / "model.safetensors").touch()
    return directory


def make_facts(
    model: Path | str, *flags: str, machine: Machine | None = None, **environment: str
) -> Facts:
    """Facts of a 1A+1F command (unless `flags` give other counts), on a CPU without `machine`."""
    argv = ["--model-path", str(model), *ONE_OF_EACH, *flags]
    if not any(flag.startswith("--port") for flag in flags):
        argv += ["--port", str(free_port())]
    command = parse(argv, transport="deepep" if machine else "gloo")
    assert command.config is not None
    return Facts(
        config=command.config,
        args=tuple(command.sglang_args),
        checkpoint=read_checkpoint(command.sglang_args),
        machine=machine or Machine(),
        on_cpu=machine is None,
        environment=environment,
    )
