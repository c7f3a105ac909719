"""The facts and errors that every model family shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]


class UnsupportedModel(ValueError):
    """A checkpoint that AFD cannot serve; the message says what is served."""


def require(family: str, name: str, found: object, wanted: object) -> None:
    """Check that a field of config.json, as the model classes understand it, is the one served.

    Raises:
        UnsupportedModel: it is not.
    """
    if found != wanted:
        raise UnsupportedModel(
            f"config.json has {name} {found!r}, and {family} is served with {wanted!r} alone"
        )


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
