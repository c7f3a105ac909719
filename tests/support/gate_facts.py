"""Facts for gate tests: checkpoints that are a config.json, command lines, made-up machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from sglang_afd.checkpoint import read_checkpoint
from sglang_afd.command_line import last_value
from sglang_afd.facts import Facts
from sglang_afd.families import UnsupportedModel, family_of
from sglang_afd.flags import VALIDATION, parse
from sglang_afd.gate import findings
from sglang_afd.machine import Gpu, Machine
from sglang_afd.model_fields import Fields, wrong_field
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
    "intermediate_size": 512,
    "vocab_size": 1024,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
H200 = Gpu("H200", (9, 0))
GPUS = Machine((H200,) * 8, frozenset({"deep_ep", "deep_gemm"}))
ONE_OF_EACH = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")


Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> type as safetensors names it, and shape."""
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "F8_E4M3": 1}


def write_model(directory: Path, weights: bool = True, **changes: Any) -> Path:
    """A checkpoint directory: config.json, where a change to None removes a field, an empty
    tokenizer.json, and weights that are a header over a hole in the file."""
    directory.mkdir(exist_ok=True)
    config = {key: value for key, value in {**MODEL, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").touch()
    if weights:
        write_weights(directory / "model.safetensors", whole_tensors(config))
    return directory


def whole_tensors(config: Mapping[str, Any]) -> Tensors:
    """The tensors that a config implies, experts in FP8 if it says so; none if it is senseless."""
    family = family_of("Qwen3MoeForCausalLM")
    fp8 = config.get("quantization_config") == FP8
    tensors: Tensors = {}
    try:
        for name, shape in family.tensors(Fields(config)) if not wrong_field(config) else ():
            expert = fp8 and family.expert_tensor(name) is not None
            tensors[name] = ("F8_E4M3" if expert else "BF16", shape)
            if expert:
                blocks = tuple(-(-size // 128) for size in shape)
                tensors[name + "_scale_inv"] = ("F32", blocks)
    except UnsupportedModel:
        return {}
    return tensors


def write_weights(file: Path, tensors: Tensors) -> None:
    """A safetensors file whose data are a hole: a header's worth on the disk, whatever its size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + _BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with file.open("r+b") as opened:
        opened.truncate(8 + len(text) + end)


def make_facts(
    model: Path | str,
    *flags: str,
    machine: Machine | None = None,
    counts: tuple[str, ...] = ONE_OF_EACH,
    **environment: str,
) -> Facts:
    """Facts of a 1A+1F command (unless `flags` give other counts), on a CPU without `machine`."""
    argv = ["--model-path", str(model), *counts, *flags]
    if not any(flag.startswith("--port") for flag in flags):
        argv += ["--port", str(free_port())]
    command = parse(argv, transport="deepep" if machine else "gloo", on_cpu=machine is None)
    assert command.config is not None
    return Facts(
        config=command.config,
        args=tuple(command.sglang_args),
        checkpoint=read_checkpoint(command.sglang_args),
        machine=machine or Machine(),
        on_cpu=machine is None,
        environment=environment,
        validation=last_value(argv, VALIDATION) or "",
    )


def refused(facts: Facts, gate: str) -> list[str]:
    """What `gate` refuses, each as ``message; mend``."""
    found = [f for f in findings(facts) if f.gate == gate]
    assert found
    return [f"{f.message}; {f.mend}" for f in found if not f.passed]
