"""The facts and errors that every model family shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]


class UnsupportedModel(ValueError):
    """A checkpoint that AFD cannot serve; the message says what is served."""


class ExpertTensor(NamedTuple):
    """A checkpoint tensor of one routed expert.

    projection: ``w1`` (gate), ``w3`` (up) or ``w2`` (down), SGLang's shard names;
    suffix: what follows the projection, e.g. ``weight`` or ``weight_scale_inv``.
    """

    layer: int
    expert: int
    projection: str
    suffix: str


@dataclass(frozen=True)
class MoeFacts:
    """The routed experts of a model: the same on every rank."""

    layers: tuple[int, ...]
    """Indices of the decoder layers that are MoE layers, in order."""
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    """Inner size of one expert."""
