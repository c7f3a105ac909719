"""Model families that AFD serves: one file each, found by the checkpoint's architecture name.

A family says where a checkpoint's routed experts are: their facts (`MoeFacts`) and the names of
their tensors; and which tensors a whole checkpoint has.  Everything else in the extension is the
same for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sglang_afd.families import qwen3_moe
from sglang_afd.families.facts import ExpertTensor, MoeFacts, Shape, UnsupportedModel

__all__ = [
    "FAMILIES",
    "ExpertTensor",
    "Family",
    "MoeFacts",
    "Shape",
    "UnsupportedModel",
    "family_of",
]


class Family(NamedTuple):
    """What the extension needs to know of a family."""

    facts: Callable[[Any], MoeFacts]
    """HF config -> facts of its routed experts."""
    expert_tensor: Callable[[str], ExpertTensor | None]
    """Checkpoint tensor name -> the expert tensor it is, or None."""
    tensors: Callable[[Any], Iterator[tuple[str, Shape]]]
    """HF config -> names and shapes of all tensors that a checkpoint must have; not their scales
    where they are quantised."""


FAMILIES: dict[str, Family] = {
    "Qwen3MoeForCausalLM": Family(qwen3_moe.facts, qwen3_moe.expert_tensor, qwen3_moe.tensors),
}


def family_of(architecture: str) -> Family:
    """The family of a checkpoint's ``architectures[0]``.

    Raises:
        UnsupportedModel: no family serves it.
    """
    try:
        return FAMILIES[architecture]
    except KeyError:
        raise UnsupportedModel(
            f"AFD does not serve {architecture} yet; it serves {', '.join(sorted(FAMILIES))} "
            f"(start without --afd-* flags to serve it with plain SGLang)"
        ) from None
