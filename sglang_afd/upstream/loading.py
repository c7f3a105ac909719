"""Checkpoint loading: each role reads its own tensors and never touches the others' bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_afd.context import current
from sglang_afd.families import ExpertTensor
from sglang_afd.families.family import FusedExperts
from sglang_afd.upstream.hooks import Hook, Kind


def _read_own_tensors(
    original: Callable[..., Any], hf_weights_files: list[str], *args: Any, **kwargs: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    import safetensors

    context = current()
    for file in hf_weights_files:
        try:
            opened = safetensors.safe_open(file, framework="pt", device="cpu")
        except (OSError, safetensors.SafetensorError) as error:
            raise _unreadable(file, error) from error
        with opened as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                try:
                    if context.loads_tensor(name):
                        yield name, tensors.get_tensor(name)
                    elif fused := context.loads_fused(name):
                        yield from _own_parts(fused, tensors.get_slice(name))
                except (OSError, safetensors.SafetensorError) as error:
                    raise _unreadable(f"{name} in {file}", error) from error


def _own_parts(fused: FusedExperts, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of this rank's experts out of that of a layer's, as if each had its own."""
    context = current()
    for expert in sorted(set(context.held(fused.layer))):
        parts = tensor[expert].chunk(len(fused.projections))
        for projection, part in zip(fused.projections, parts):
            own = ExpertTensor(fused.layer, expert, projection, "weight")
            yield context.family.experts.spell(own), part


def _unreadable(what: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"{current().name} cannot read {what}: {error}; download the checkpoint again, whole"
    )


HOOKS = tuple(
    Hook(
        f"sglang.srt.model_loader.weight_utils.{iterator}",
        Kind.AROUND,
        _read_own_tensors,
        "A ranks read no expert tensor, F ranks only those of their experts",
    )
    for iterator in (
        "safetensors_weights_iterator",
        "buffered_multi_thread_safetensors_weights_iterator",
    )
)
