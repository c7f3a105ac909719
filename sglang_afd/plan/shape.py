"""`ModelShape`: what a model's config.json says of sizes.

The planner reads more families than AFD serves today; `served` in the output says which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sglang_afd.checkpoint import read_checkpoint
from sglang_afd.plan.errors import PlanError, whole

SHIPPED = Path(__file__).with_name("models")
_MOST_EXPERTS = 2**14
_BLOCK_SCALE = 4 / (128 * 128)
"""Bytes of FP8 block scales per weight."""


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer: parameters and cache of everything but the routed experts."""

    attention: str
    """``gqa``, ``mla`` or ``linear``."""
    projections: int
    """Parameters of the attention's projections."""
    kv_elements: int
    """Cache elements of one token."""
    state_bytes: int
    """Bytes of one request's fixed state (linear attention)."""
    score_flops: int
    """FLOPs of a query token for one token of its context."""
    core_in: int
    """Elements that core attention reads of a token: queries, keys, values."""
    core_out: int
    """Elements that core attention yields for a token."""
    dense: int
    """Parameters of the dense MLP, or of the shared experts."""
    router: int
    """Parameters of the router; 0: no routed experts in this layer."""
    kernels: int
    """Kernels of a decode step beside core attention, routed experts and exchange."""


@dataclass(frozen=True)
class ModelShape:
    """A model: its layers, its routed experts, and how its weights are stored."""

    name: str
    architecture: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[LayerShape, ...]
    experts: int
    top_k: int
    intermediate: int
    """Inner size of one routed expert."""
    fp8: bool
    """Projections and experts are FP8 with block scales; the rest has `itemsize`."""
    itemsize: int
    """Bytes of an element of a row, and of an unquantised weight."""

    @cached_property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(layer.router > 0 for layer in self.layers)

    @cached_property
    def moe(self) -> np.ndarray:
        """Which layers have routed experts: bool [layers]."""
        return np.array([layer.router > 0 for layer in self.layers])

    def each(self, field: str) -> np.ndarray:
        """A field of every layer, as floats [layers]."""
        return np.array([getattr(layer, field) for layer in self.layers], dtype=float)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a projection's or an expert's weight, its share of the scales included."""
        return 1 + _BLOCK_SCALE if self.fp8 else float(self.itemsize)

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert of one layer: gate, up and down."""
        return 3 * self.hidden * self.intermediate * self.weight_bytes

    @cached_property
    def layer_weight_bytes(self) -> np.ndarray:
        """Bytes of each layer without its routed experts [layers]."""
        quantised = (self.each("projections") + self.each("dense")) * self.weight_bytes
        return quantised + (self.each("router") + 2 * self.hidden) * self.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of the lm_head, which every step reads."""
        return self.vocab * self.hidden * self.itemsize

    @cached_property
    def attention_weight_bytes(self) -> float:
        """Bytes of weights on an attention rank: layers, embedding and lm_head."""
        return float(self.layer_weight_bytes.sum()) + self.head_bytes * (1 if self.tied else 2)

    @cached_property
    def routed_weight_bytes(self) -> float:
        """Bytes of all routed experts."""
        return self.moe_layers * self.experts * self.expert_bytes

    def kv_bytes(self, itemsize: int) -> float:
        """Cache bytes of one token, all layers."""
        return float(self.each("kv_elements").sum()) * itemsize

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of one request's fixed state, all layers."""
        return float(self.each("state_bytes").sum())


def shipped() -> list[str]:
    """Names of the configurations that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def read_shape(path: str) -> ModelShape:
    """The shape of a model.

    Args:
        path: a config.json, a checkpoint's directory, a Hugging Face Hub name, or a name out of
            `shipped`.

    Raises:
        PlanError: it cannot be read, or lacks a field.
    """
    name = path
    if path in shipped():
        path = str(SHIPPED / f"{path}.json")
    if Path(path).is_file():
        return shape_of(_config_file(Path(path)), name=Path(name).name.removesuffix(".json"))
    found = read_checkpoint(["--model-path", path])
    if found.config is None:
        raise PlanError(
            "--model-path",
            f"{found.problem}; give a config.json, a checkpoint's directory, a name on the "
            f"Hub, or one of {', '.join(shipped())}",
        )
    return shape_of(found.config, name=Path(path).name)


def _config_file(path: Path) -> Mapping[str, Any]:
    import json

    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError("--model-path", f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise PlanError("--model-path", f"{path} holds no JSON object")
    return config


def shape_of(config: Mapping[str, Any], *, name: str = "model") -> ModelShape:
    """The shape that a config.json describes.

    Raises:
        PlanError: its architecture is not known to the planner, or a field is missing or wrong.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise PlanError("architectures", "config.json names none")
    architecture = str(architectures[0])
    if architecture not in _LAYERS:
        raise PlanError(
            "architectures",
            f"the planner does not know {architecture}; it knows {', '.join(sorted(_LAYERS))}",
        )
    for field in ("text_config", "quantization_config"):
        if not isinstance(config.get(field) or {}, dict):
            raise PlanError(field, "is no object")
    text = _Text(config.get("text_config") or config)
    dtype = text.fields.get("dtype") or text.fields.get("torch_dtype") or "bfloat16"
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method not in (None, "fp8"):
        raise PlanError("quantization_config", f"{method} is not known; fp8 or none is")
    layers = _LAYERS[architecture](text)
    shape = ModelShape(
        name=name,
        architecture=architecture,
        hidden=text.size("hidden_size"),
        vocab=text.size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", text.fields.get("tie_word_embeddings", False))),
        layers=layers,
        experts=text.size(
            "num_experts", "num_local_experts", "n_routed_experts", most=_MOST_EXPERTS
        ),
        top_k=text.size("num_experts_per_tok"),
        intermediate=text.size(
            "intermediate_size" if "MiniMax" in architecture else "moe_intermediate_size"
        ),
        fp8=method == "fp8",
        itemsize=4 if dtype == "float32" else 2,
    )
    if shape.top_k > shape.experts:
        raise PlanError("num_experts_per_tok", f"{shape.top_k} of {shape.experts} experts")
    if not shape.moe_layers:
        raise PlanError("config.json", "no layer has routed experts, so there is nothing to split")
    return shape


class _Text:
    """The language model's fields, read with their names in the errors."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    @property
    def layers(self) -> int:
        """Decoder layers; the planner keeps each."""
        return whole("num_hidden_layers", self.fields.get("num_hidden_layers"), most=1000)

    def entries(self, name: str) -> list[Any]:
        """A field that is a list; empty where it is not there."""
        found = self.fields.get(name)
        if found is not None and not isinstance(found, list | tuple):
            raise PlanError(name, f"{found!r} is no list")
        return list(found or ())

    def size(
        self, *names: str, default: int | None = None, least: int = 1, most: int = 10**7
    ) -> int:
        """The first of `names` that is there, or `default`."""
        for name in names:
            if self.fields.get(name) is not None:
                return whole(name, self.fields[name], least=least, most=most)
        if default is None:
            raise PlanError(names[0], "config.json has no such field")
        return default


def _gqa(text: _Text, *, gated: bool = False, extra: int = 0) -> dict[str, Any]:
    """Grouped-query attention: 12 kernels with its norms, FP8 quantisation, router and top-k."""
    hidden, heads = text.size("hidden_size"), text.size("num_attention_heads")
    kv = text.size("num_key_value_heads", default=heads)
    size = text.size("head_dim", default=max(1, hidden // heads))
    queries = heads * size
    return {
        "attention": "gqa",
        "projections": hidden * (queries * (3 if gated else 2) + 2 * kv * size),
        "kv_elements": 2 * kv * size,
        "state_bytes": 0,
        "score_flops": 4 * queries,
        "core_in": queries + 2 * kv * size,
        "core_out": queries,
        "kernels": 12 + extra,
    }


def _qwen3(text: _Text) -> tuple[LayerShape, ...]:
    hidden = text.size("hidden_size")
    step = text.size("decoder_sparse_step", default=1)
    dense_only = text.entries("mlp_only_layers")
    layers = []
    for index in range(text.layers):
        routed = index not in dense_only and (index + 1) % step == 0
        dense = 0 if routed else 3 * hidden * text.size("intermediate_size")
        router = hidden * text.size("num_experts", "num_local_experts") if routed else 0
        layers.append(LayerShape(**_gqa(text), dense=dense, router=router))
    return tuple(layers)


def _minimax(text: _Text) -> tuple[LayerShape, ...]:
    # Beside Qwen3's 12: q and k norms over all heads (variance, then scale: 2 more), and a router
    # with float32 cast, sigmoid, bias, gather and renormalisation in place of one softmax top-k (4
    # more, as torch.compile fuses them).
    router = text.size("hidden_size") * text.size("num_local_experts", "num_experts")
    layer = LayerShape(**_gqa(text, extra=6), dense=0, router=router)
    return (layer,) * text.layers


def _qwen3_5(text: _Text) -> tuple[LayerShape, ...]:
    hidden = text.size("hidden_size")
    shared = 3 * hidden * text.size("shared_expert_intermediate_size") + hidden
    router = hidden * text.size("num_experts")
    count = text.layers
    interval = text.size("full_attention_interval", default=4)
    kinds = text.entries("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)
    ]
    if len(kinds) != count:
        raise PlanError("layer_types", f"{len(kinds)} entries for {count} layers")
    key_heads, value_heads = text.size("linear_num_key_heads"), text.size("linear_num_value_heads")
    key, value = text.size("linear_key_head_dim"), text.size("linear_value_head_dim")
    mixed = 2 * key_heads * key + value_heads * value
    kernel = text.size("linear_conv_kernel_dim", default=4)
    linear: dict[str, Any] = {
        "attention": "linear",
        "projections": hidden * (mixed + 2 * value_heads * value + 2 * value_heads),
        "kv_elements": 0,
        # the recurrent state is float32; the convolution keeps kernel - 1 inputs
        "state_bytes": value_heads * key * value * 4 + mixed * (kernel - 1) * 2,
        "score_flops": 0,
        "core_in": mixed,
        "core_out": value_heads * value,
        "kernels": 12,
    }
    full = _gqa(text, gated=bool(text.fields.get("attn_output_gate", True)), extra=1)
    layers = []
    for kind in kinds:
        attention = dict(linear if kind == "linear_attention" else full)
        attention["kernels"] += 6  # the shared expert's GEMMs, activation, gate and sum
        layers.append(LayerShape(**attention, dense=shared, router=router))
    return tuple(layers)


def _deepseek(text: _Text) -> tuple[LayerShape, ...]:
    hidden, heads = text.size("hidden_size"), text.size("num_attention_heads")
    lora, rope = text.size("kv_lora_rank"), text.size("qk_rope_head_dim")
    nope, value = text.size("qk_nope_head_dim"), text.size("v_head_dim")
    query_lora = text.size("q_lora_rank", default=0, least=0)
    queries = heads * (nope + rope)
    query = hidden * query_lora + query_lora * queries if query_lora else hidden * queries
    latent = heads * (lora + rope)
    attention: dict[str, Any] = {
        "attention": "mla",
        "projections": query
        + hidden * (lora + rope)
        + lora * heads * (nope + value)
        + heads * value * hidden,
        "kv_elements": lora + rope,
        "state_bytes": 0,
        "score_flops": 2 * (latent + heads * lora),
        "core_in": latent + lora + rope,
        "core_out": heads * lora,
    }
    first = text.size("first_k_dense_replace", default=0, least=0)
    every = text.size("moe_layer_freq", default=1)
    expert = 3 * hidden * text.size("moe_intermediate_size")
    shared = text.size("n_shared_experts", default=0, least=0)
    layers = []
    for index in range(text.layers):
        routed = index >= first and index % every == 0
        dense = shared * expert if routed else 3 * hidden * text.size("intermediate_size")
        router = hidden * text.size("n_routed_experts") if routed else 0
        # low-rank norms and the two absorbed GEMMs: 16; a dense MLP or shared expert: 6
        kernels = 16 + (6 if dense else 0)
        layers.append(LayerShape(**attention, dense=dense, router=router, kernels=kernels))
    return tuple(layers)


_LAYERS: dict[str, Callable[[_Text], tuple[LayerShape, ...]]] = {
    "Qwen3MoeForCausalLM": _qwen3,
    "MiniMaxM2ForCausalLM": _minimax,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5,
    "DeepseekV3ForCausalLM": _deepseek,
}
