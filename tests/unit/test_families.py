"""Model families: the facts of their experts, and the names of their tensors."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from sglang_afd import embedded
from sglang_afd.cad.gate import FAMILIES as CAD_FAMILIES
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import FAMILIES, ExpertTensor, MoeFacts, UnsupportedModel, family_of
from sglang_afd.flags import GPU_LANE_MODELS
from sglang_afd.model_fields import Fields
from tests.support.families import ROWS, WRAPPED, language_model
from tools.family_table import BEGIN, END, README, table, with_table

pytestmark = pytest.mark.unit

QWEN3 = family_of("Qwen3MoeForCausalLM")
MINIMAX = family_of("MiniMaxM2ForCausalLM")
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def facts(**changes: Any) -> MoeFacts:
    return QWEN3.facts(SimpleNamespace(**{**CONFIG, **changes}))


def test_facts_are_those_of_the_config() -> None:
    assert facts() == MoeFacts(
        layers=(0, 1, 2, 3, 4, 5), num_experts=8, top_k=2, hidden_size=64, intermediate_size=32
    )


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"num_experts": 0}, ()),
    ],
)
def test_dense_layers_are_no_moe_layers(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert facts(**changes).layers == layers


def test_the_moe_layers_are_those_that_transformers_builds() -> None:
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (
        Qwen3MoeModel,
        Qwen3MoeSparseMoeBlock,
    )

    for changes in ({"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {"num_experts": 0}):
        config = Qwen3MoeConfig(
            **{**CONFIG, **changes}, vocab_size=8, num_attention_heads=2, num_key_value_heads=1
        )
        with torch.device("meta"):
            model = Qwen3MoeModel(config)
        built = [isinstance(layer.mlp, Qwen3MoeSparseMoeBlock) for layer in model.layers]
        expected = QWEN3.facts(config).layers
        assert tuple(i for i, sparse in enumerate(built) if sparse) == expected, changes


def test_expert_tensors_of_a_checkpoint_are_all_found() -> None:
    """The embedded checkpoint: its expert tensors have as many elements as its facts say."""
    folder = embedded.path()
    found = QWEN3.facts(SimpleNamespace(**json.loads((folder / "config.json").read_text())))
    elements, places = 0, set()
    with safe_open(folder / "model.safetensors", framework="pt") as checkpoint:
        for name in checkpoint.keys():  # noqa: SIM118 (safe_open is no mapping)
            tensor = QWEN3.expert_tensor(name)
            assert (tensor is not None) == (".experts." in name), name
            if tensor is not None:
                rows, columns = checkpoint.get_slice(name).get_shape()
                sizes = (found.intermediate_size, found.hidden_size)
                assert (rows, columns) == (sizes if tensor.projection != "w2" else sizes[::-1])
                elements += rows * columns
                places.add(tensor)
    one = 3 * found.hidden_size * found.intermediate_size
    assert elements == len(found.layers) * found.num_experts * one
    assert places == {
        ExpertTensor(layer, expert, projection, "weight")
        for layer in found.layers
        for expert in range(found.num_experts)
        for projection in ("w1", "w2", "w3")
    }


@given(
    st.integers(0, 200),
    st.integers(0, 1000),
    st.sampled_from([("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")]),
    st.sampled_from(["weight", "weight_scale_inv"]),
)
def test_expert_names_are_read(
    layer: int, expert: int, projection: tuple[str, str], suffix: str
) -> None:
    name = f"model.layers.{layer}.mlp.experts.{expert}.{projection[0]}.{suffix}"
    assert QWEN3.expert_tensor(name) == ExpertTensor(layer, expert, projection[1], suffix)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("block_sparse_moe.experts.7.w1.weight", ExpertTensor(3, 7, "w1", "weight")),
        ("block_sparse_moe.experts.7.w3.weight", ExpertTensor(3, 7, "w3", "weight")),
        (
            "block_sparse_moe.experts.7.w2.weight_scale_inv",
            ExpertTensor(3, 7, "w2", "weight_scale_inv"),
        ),
        ("block_sparse_moe.gate.weight", None),
        ("block_sparse_moe.e_score_correction_bias", None),
        ("mlp.experts.7.gate_proj.weight", None),
    ],
)
def test_minimax_names_are_read(name: str, tensor: ExpertTensor | None) -> None:
    assert MINIMAX.expert_tensor(f"model.layers.3.{name}") == tensor


MINIMAX_CONFIG = {
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
    "rotary_dim": 16,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
}


def test_minimax_facts() -> None:
    assert MINIMAX.facts(Fields(MINIMAX_CONFIG)) == MoeFacts((0, 1), 4, 2, 64, 32)


@pytest.mark.parametrize("name", ["rotary_dim", "use_qk_norm", "use_routing_bias", "scoring_func"])
def test_minimax_needs_the_fields_that_sglang_goes_by(name: str) -> None:
    """transformers' class does not have them; without, SGLang would leave out what they turn on."""
    without = {key: value for key, value in MINIMAX_CONFIG.items() if key != name}
    with pytest.raises(UnsupportedModel, match=f"config.json has no {name};"):
        MINIMAX.facts(Fields(without))


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_qk_norm", False), ("use_routing_bias", False), ("scoring_func", "softmax")],
)
def test_minimax_with_other_parts_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"config.json has {name} {value!r}, and"):
        MINIMAX.facts(Fields({**MINIMAX_CONFIG, name: value}))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.mlp.shared_expert.gate_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.experts.7.gate_proj.weight.more",
        "draft.model.layers.3.mlp.experts.7.gate_proj.weight",
        "model.layersX3.mlp.experts.7.gate_proj.weight",
        "model.layers.x.mlp.experts.7.gate_proj.weight",
    ],
)
def test_other_tensors_are_no_expert_tensors(name: str) -> None:
    assert QWEN3.expert_tensor(name) is None


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GptOssForCausalLM"])
def test_an_unknown_family_is_refused_with_those_that_are_served(architecture: str) -> None:
    """gpt-oss among them: its experts have biases and an activation of their own."""
    with pytest.raises(UnsupportedModel) as refusal:
        family_of(architecture)
    message = str(refusal.value)
    assert f"does not serve {architecture}" in message
    assert "Qwen3MoeForCausalLM" in message
    assert "without --afd-* flags" in message


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ("deepseek-v3", {"scoring_func": "softmax"}, "'softmax' with topk_method 'noaux_tc'; serv"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "'softmax' with topk_method 'noaux_tc'; serv"),
        ("deepseek-v2", {"topk_method": "greedy"}, "n_group 4 with topk_method 'greedy'"),
        ("deepseek-v3", {"attention_bias": True}, "has attention_bias, which SGLang"),
    ],
)
def test_deepseek_with_other_parts_is_refused(
    row: str, changes: dict[str, Any], message: str
) -> None:
    config = ROWS[row]()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=message):
        family_of(config.architectures[0]).facts(config)


def test_glm4_tensors_of_another_shape() -> None:
    """GLM-4.5-Air in published form: no QK norm, one dense layer."""
    config = ROWS["glm4"]()
    config.use_qk_norm, config.n_group, config.topk_group = False, 1, 1
    glm4 = family_of("Glm4MoeForCausalLM")
    assert glm4.facts(config).layers == (1, 2)
    shapes = dict(glm4.tensors(config))
    assert not [name for name in shapes if "q_norm" in name or "k_norm" in name]
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (64, 128)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (192, 128)
    assert shapes["model.layers.0.self_attn.q_proj.bias"] == (256,)


def test_deepseek_tensors_of_another_shape() -> None:
    """V2 without low-rank queries in published form: one group, no shared expert."""
    config = ROWS["deepseek-v2"]()
    config.topk_method, config.n_group, config.n_shared_experts = "greedy", 1, 0
    config.q_lora_rank, config.moe_layer_freq = 24, 2
    deepseek = family_of("DeepseekV2ForCausalLM")
    assert deepseek.facts(config).layers == (2,)
    shapes = dict(deepseek.tensors(config))
    assert shapes["model.layers.0.self_attn.q_b_proj.weight"] == (4 * 48, 24)
    assert "model.layers.0.self_attn.q_proj.weight" not in shapes
    assert "model.layers.1.mlp.gate_proj.weight" in shapes
    assert not [name for name in shapes if "shared" in name or "bias" in name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "has attention_bias True"),
        ({"attn_output_gate": False}, "has attn_output_gate False"),
        ({"norm_topk_prob": False}, "has norm_topk_prob False"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
        ({"full_attention_interval": 2}, "not those of full_attention_interval 2"),
    ],
)
def test_qwen3_5_with_other_parts_is_refused(changes: dict[str, Any], message: str) -> None:
    config = ROWS["qwen3.5"]()
    for name, value in changes.items():
        setattr(config, name, value)
    for read in (config, Fields(config.to_dict())):
        with pytest.raises(UnsupportedModel, match=message):
            family_of(config.architectures[0]).facts(read)


@pytest.mark.parametrize("row", ["qwen3.5", "qwen3.5-vision"])
def test_drafts_and_vision_towers_are_read_by_no_rank(row: str) -> None:
    family, text = family_of(ROWS[row]().architectures[0]), language_model(row)
    config = AfdConfig(attention_ranks=1, ffn_ranks=1)
    others = ["mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"]
    if family.wrapped:
        others.append("model.visual.blocks.0.attn.qkv.weight")
    for rank in range(2):
        context = RankContext(config, rank, family, family.facts(text), {})
        for name in others:
            assert not context.loads_tensor(name) and context.loads_fused(name) is None
    stem = family.experts.stem
    for layer, read in ((4, True), (5, False)):
        name = f"{stem}.layers.{layer}.mlp.experts.down_proj"
        assert (context.loads_fused(name) is not None) == read
        assert not RankContext(config, 0, family, family.facts(text), {}).loads_tensor(name)


def test_only_a_wrapped_model_is_cut_down() -> None:
    from sglang_afd.upstream.text_only import HOOKS

    for row in ROWS:
        config = ROWS[row]()
        assert HOOKS[0].fn(config) is None
        assert getattr(config, "language_model_only", False) == (row in WRAPPED)


def test_the_readmes_table_is_up_to_date() -> None:
    assert with_table(README.read_text()) == README.read_text(), "run: python -m tools.family_table"
    lines = table().splitlines()
    assert {line.count("|") for line in lines} == {10}
    for family in FAMILIES.values():
        [line] = [line for line in lines if line.startswith(f"| {family.name} |")]
        assert family.models in line and line.endswith(f"| {family.cpu} | {family.gpu} |")
        lanes = set(family.architectures) <= set(GPU_LANE_MODELS)
        assert ("GPUs over nvlink" in line) == lanes
        assert (f"| CPU | {family.cpu} |" in line) == (family.name in CAD_FAMILIES)
        assert ("| EAGLE-3 |" in line) == (family is FAMILIES["Qwen3MoeForCausalLM"])


def test_a_text_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no <!-- families"):
        with_table(f"{END} {BEGIN}")


def test_every_family_has_a_checkpoint_to_test_with() -> None:
    own = {"Qwen3MoeForCausalLM"}  # tests.support.checkpoints
    assert {make().architectures[0] for make in ROWS.values()} | own == set(FAMILIES)
