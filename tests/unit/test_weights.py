"""The model gate knows a whole checkpoint from its files' headers, and says what another lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_afd import embedded
from sglang_afd.checkpoint import read_checkpoint
from sglang_afd.embedded.checkpoint import unpack_experts
from sglang_afd.families import family_of
from sglang_afd.gate import findings
from sglang_afd.weights import stored_tensors
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.gate_facts import (
    FP8,
    GPUS,
    MODEL,
    Tensors,
    make_facts,
    whole_tensors,
    write_model,
    write_weights,
)

pytestmark = pytest.mark.unit


def refused(directory: Path, *flags: str, gpus: bool = False) -> list[str]:
    facts = make_facts(directory, *flags, machine=GPUS if gpus else None)
    found = [f for f in findings(facts) if f.gate == "model" and not f.passed]
    return [f"{f.message}; {f.mend}" for f in found]


def rewrite(directory: Path, tensors: Tensors) -> None:
    write_weights(directory / "model.safetensors", tensors)


def kinds(tensors: Tensors) -> dict[str, str]:
    """One tensor of each kind: tensors of other layers and experts are like it."""
    return {re.sub(r"\.\d+\.", ".N.", name): name for name in tensors}


def test_real_checkpoints_pass(tmp_path: Path) -> None:
    assert refused(embedded.path()) == []
    assert refused(seeded_qwen3_moe(tmp_path / "one", seed=1)) == []
    assert refused(seeded_qwen3_moe(tmp_path / "three", seed=1, shards=3)) == []


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"mlp_only_layers": [1]}],
    ids=str,
)
def test_the_tensors_are_those_of_transformers(changes: dict[str, Any]) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=2, num_experts=3, hidden_size=64, moe_intermediate_size=32, vocab_size=99,
        intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=24, **changes,
    )  # fmt: skip
    with torch.device("meta"):
        state = unpack_experts(Qwen3MoeForCausalLM(config).state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    theirs = {name: tuple(t.shape) for name, t in state.items() if "o_proj.bias" not in name}
    assert dict(family_of("Qwen3MoeForCausalLM").tensors(config)) == theirs


@pytest.mark.parametrize("quantised", [False, True])
def test_every_missing_tensor_is_named(tmp_path: Path, quantised: bool) -> None:
    changes = {"quantization_config": FP8} if quantised else {}
    write_model(tmp_path, attention_bias=True, **changes)
    whole = whole_tensors({**MODEL, "attention_bias": True, **changes})
    assert refused(tmp_path, gpus=True) == []
    assert len(kinds(whole)) == 18 + 3 * quantised
    for name in kinds(whole).values():
        rewrite(tmp_path, {n: t for n, t in whole.items() if n != name})
        [text] = refused(tmp_path, gpus=True)
        assert text.startswith("the checkpoint lacks 1 of the tensors that its config.json implies")
        assert f"first {name}; " in text and "complete checkpoint" in text


@pytest.mark.parametrize("quantised", [False, True])
def test_every_other_shape_is_named(tmp_path: Path, quantised: bool) -> None:
    """Fewer rows, or a transposed matrix."""
    changes = {"quantization_config": FP8} if quantised else {}
    write_model(tmp_path, **changes)
    whole = whole_tensors({**MODEL, **changes})
    for name in kinds(whole).values():
        dtype, shape = whole[name]
        for other in {(shape[0] - 1, *shape[1:]), shape[::-1]} - {shape}:
            rewrite(tmp_path, {**whole, name: (dtype, other)})
            [text] = refused(tmp_path, gpus=True)
            assert text.startswith("the shapes of 1 of the tensors are not what config.json")
            assert name in text and "x".join(map(str, other)) in text


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F64"])
def test_types_that_are_not_served_are_named(tmp_path: Path, dtype: str) -> None:
    write_model(tmp_path)
    whole = whole_tensors(MODEL)
    for name in kinds(whole).values():
        rewrite(tmp_path, {**whole, name: (dtype, whole[name][1])})
        [text] = refused(tmp_path)
        assert text == (
            f"the types of 1 of the tensors are not served, first {name} is {dtype} in "
            f"model.safetensors; use a checkpoint with BF16, F16, F32"
        )


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_types_are_served(tmp_path: Path, dtype: str) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, {name: (dtype, shape) for name, (_, shape) in whole_tensors(MODEL).items()})
    assert refused(tmp_path) == []


def test_an_fp8_checkpoint_has_its_experts_in_fp8(tmp_path: Path) -> None:
    write_model(tmp_path, quantization_config=FP8)
    rewrite(tmp_path, whole_tensors(MODEL))
    [text] = refused(tmp_path, gpus=True)
    assert text.endswith("use a checkpoint with experts in F8_E4M3 with their scales")


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50
)
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_named(tmp_path: Path, where: float) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    size = file.stat().st_size
    for length in (int(header * where), int(size * where)):
        write_model(tmp_path)
        with file.open("r+b") as opened:
            opened.truncate(length)
        [text] = refused(tmp_path)
        assert text.startswith(f"{file} ") and text.endswith("; download it again, whole"), text
        assert f"{length} bytes" in text


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\x02" + bytes(7) + b"[]",
        b"\x02" + bytes(7) + b"{:",
        b"\x07" + bytes(7) + b'{"a":5}',
        b"\x08" + bytes(7) + b'{"a":{}}',
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(content)
    [text] = refused(tmp_path)
    assert text.startswith(f"{file} ") and text.endswith("; download it again, whole")


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    seeded_qwen3_moe(tmp_path, seed=1, shards=2)
    (tmp_path / "consolidated.safetensors").touch()
    assert refused(tmp_path) == []
    index = tmp_path / "model.safetensors.index.json"
    for senseless in ([], {"weight_map": {"a": 5}}, {"weight_map": []}):
        index.write_text(json.dumps(senseless))
        [text] = refused(tmp_path)
        assert "model.safetensors.index.json" in text


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").write_bytes(b"")
    assert refused(tmp_path, "--load-format", "dummy") == []


def test_the_tokenizer_must_be_there(tmp_path: Path) -> None:
    (write_model(tmp_path) / "tokenizer.json").unlink()
    [text] = refused(tmp_path)
    assert text.startswith(f"{tmp_path} has no tokenizer: ") and "--skip-tokenizer-init" in text
    assert refused(tmp_path, "--skip-tokenizer-init") == []
    assert refused(tmp_path, "--tokenizer-path", "/elsewhere") == []
    for file in ("vocab.json", "tokenizer.model", "qwen.tiktoken"):
        (tmp_path / file).touch()
        assert refused(tmp_path) == []
        (tmp_path / file).unlink()


def test_a_checkpoint_of_the_largest_size_is_read_in_moments(tmp_path: Path) -> None:
    """235 billion parameters in 100 files, of which the headers alone are on the disk."""
    config = {
        **MODEL, "num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8,
        "hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64,
        "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    write_model(tmp_path, weights=False, **config)
    whole = whole_tensors(config)
    names = sorted(whole)
    weight_map = {}
    for number in range(100):
        file = f"{number}.safetensors"
        write_weights(tmp_path / file, {name: whole[name] for name in names[number::100]})
        weight_map |= dict.fromkeys(names[number::100], file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert (
        len(stored_tensors(read_checkpoint(["--model-path", str(tmp_path)]).weight_files())) > 36000
    )
    assert refused(tmp_path, gpus=True) == []
