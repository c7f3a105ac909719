"""What a model family tells the extension, and the parts that most families share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from sglang_afd.families.facts import ExpertTensor, MoeFacts, Shape

Tensors = Iterator[tuple[str, Shape]]
"""Names and shapes; ``[out, in]`` for projections."""


class FusedExperts(NamedTuple):
    """A checkpoint tensor of all experts of a layer, [experts, rows, columns].

    projections: as in `ExpertTensor`; an expert's rows are divided among them equally.
    """

    layer: int
    projections: tuple[str, ...]


_FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


@dataclass(frozen=True)
class ExpertNames:
    """How a family's checkpoints spell the tensors of its routed experts:
    ``STEM.layers.L.MODULE.experts.E.PROJECTION.SUFFIX``.

    module: the layer's module that holds the experts; gate, up, down: their projections.
    fused: a checkpoint may have one tensor for all experts of a layer instead, as transformers'
        classes do: ``STEM.layers.L.MODULE.experts.gate_up_proj`` and ``down_proj``.
    """

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stem: str = "model"
    fused: bool = False

    @property
    def projections(self) -> dict[str, str]:
        """The checkpoint's name of SGLang's shards."""
        return {"w1": self.gate, "w2": self.down, "w3": self.up}

    def prefix(self, layer: int) -> str:
        """The module of a layer's experts."""
        return f"{self.stem}.layers.{layer}.{self.module}.experts"

    def spell(self, tensor: ExpertTensor) -> str:
        """The checkpoint's name of `tensor`."""
        projection = self.projections[tensor.projection]
        return f"{self.prefix(tensor.layer)}.{tensor.expert}.{projection}.{tensor.suffix}"

    def read(self, name: str) -> ExpertTensor | None:
        """The expert tensor that a checkpoint name stands for, or None."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        layer, expert, projection, suffix = match.groups()
        shard = next(s for s, spelt in self.projections.items() if spelt == projection)
        return ExpertTensor(int(layer), int(expert), shard, suffix)

    def read_fused(self, name: str) -> FusedExperts | None:
        """What a checkpoint name stands for if it is that of a layer's experts, or None."""
        match = self._fused_pattern.fullmatch(name) if self.fused else None
        return match and FusedExperts(int(match[1]), _FUSED[match[2]])

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        projections = "|".join(self.projections.values())
        return re.compile(rf"{self._layer_pattern}\.(\d+)\.({projections})\.(\w+)")

    @cached_property
    def _fused_pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{self._layer_pattern}\.({'|'.join(_FUSED)})")

    @cached_property
    def _layer_pattern(self) -> str:
        return rf"{re.escape(self.stem)}\.layers\.(\d+)\.{self.module}\.experts"


@dataclass(frozen=True)
class Family:
    """What the extension needs to know of a family."""

    name: str
    architectures: tuple[str, ...]
    """What ``architectures[0]`` of its checkpoints' config.json may be."""
    models: str
    """Published models of the family."""
    facts: Callable[[Any], MoeFacts]
    """HF config -> facts of its routed experts; raises `UnsupportedModel`."""
    experts: ExpertNames
    tensors: Callable[[Any], Tensors]
    """HF config -> all tensors that a checkpoint must have; not their scales where they are
    quantised."""
    cpu: str
    """Where greedy tokens were shown to equal HF transformers' on a CPU."""
    gpu: str
    """What has run on GPUs."""
    wrapped: bool = False
    """Its checkpoints are more than a language model, which is served alone."""
    recurrent: tuple[str, ...] = ()
    """How the names of tensors end that a layer's recurrence reads, beside its rows; in CAD mode
    attention ranks read them."""
    unread: tuple[str, ...] = ()
    """How the names of tensors begin that no rank reads."""
    dtypes: str = "FP32, BF16; on CUDA FP8 in 128 x 128 blocks"
    transports: str = "gloo, deepep, nvlink"

    def expert_tensor(self, name: str) -> ExpertTensor | None:
        """The expert tensor that a checkpoint name stands for, or None."""
        return self.experts.read(name)


def decoder(hf_config: Any, layer: Callable[[int, str], Tensors], stem: str = "model") -> Tensors:
    """Embedding, norms and head, and what ``layer(index, prefix)`` gives of each layer."""
    hidden, vocab = hf_config.hidden_size, hf_config.vocab_size
    yield f"{stem}.embed_tokens.weight", (vocab, hidden)
    yield f"{stem}.norm.weight", (hidden,)
    if not hf_config.tie_word_embeddings:
        yield "lm_head.weight", (vocab, hidden)
    for index in range(hf_config.num_hidden_layers):
        prefix = f"{stem}.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield from layer(index, prefix)


def grouped_attention(
    hf_config: Any, prefix: str, *, bias: bool = False, gated: bool = False
) -> Tensors:
    """The projections of grouped-query attention; `gated`: that of the queries gives a gate too."""
    hidden = hf_config.hidden_size
    query, key = attention_widths(hf_config)
    for projection, width in (("q", query * (1 + gated)), ("k", key), ("v", key)):
        yield f"{prefix}.self_attn.{projection}_proj.weight", (width, hidden)
        if bias:
            yield f"{prefix}.self_attn.{projection}_proj.bias", (width,)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)


def attention_widths(hf_config: Any) -> tuple[int, int]:
    """The widths of all query heads, and of all key heads."""
    head = hf_config.head_dim or hf_config.hidden_size // hf_config.num_attention_heads
    return head * hf_config.num_attention_heads, head * hf_config.num_key_value_heads


def feed_forward(
    prefix: str, hidden: int, width: int, names: ExpertNames = ExpertNames()
) -> Tensors:
    """The projections of one expert, or of a dense layer."""
    yield f"{prefix}.{names.gate}.weight", (width, hidden)
    yield f"{prefix}.{names.up}.weight", (width, hidden)
    yield f"{prefix}.{names.down}.weight", (hidden, width)


def routed_experts(names: ExpertNames, layer: int, facts: MoeFacts) -> Tensors:
    """All routed experts of a layer."""
    for expert in range(facts.num_experts):
        prefix = f"{names.prefix(layer)}.{expert}"
        yield from feed_forward(prefix, facts.hidden_size, facts.intermediate_size, names)
