"""Whether a running deployment can take another checkpoint's weights: asked before any rank reads.

The model that is built stays; only its tensors change.  So the new checkpoint must describe the
same model and hold every tensor of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_afd.checkpoint import Checkpoint
from sglang_afd.facts import Refusal
from sglang_afd.model_gate import weight_refusals

LOAD_FORMATS = ("auto", "safetensors")
_OF_THE_WRITER = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
"""Fields of config.json that tell of the file's writer, not of the model."""
_RESTART = "restart the deployment with it"


def refusals(served: Checkpoint, new: Checkpoint, load_format: str) -> Iterator[Refusal]:
    """Why the deployment that serves `served` cannot take the weights of `new`.

    Args:
        load_format: as SGLang's --load-format.
    """
    if served.config is None:
        yield Refusal(
            f"the weights that run cannot be read again ({served.problem}), so that no rank could "
            f"go back to them",
            "restart the deployment",
        )
        return
    if load_format not in LOAD_FORMATS:
        yield Refusal(
            f"load format {load_format} does not read each rank's own tensors from the disk",
            f"use load_format {' or '.join(LOAD_FORMATS)}",
        )
        return
    if new.config is None:
        yield Refusal(new.problem, new.mend)
        return
    differing = sorted(_differing(served.config, new.config))
    if differing:
        yield Refusal(
            f"{new.path} describes another model than the one that runs: its config.json differs "
            f"in {', '.join(differing)}",
            _RESTART,
        )
        return
    yield from weight_refusals(new, look_inside=True)


def _differing(
    served: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """The fields that both have, with other values: a writer may leave defaults out."""
    for name in served.keys() & new.keys() - _OF_THE_WRITER:
        before, after = served[name], new[name]
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differing(before, after, f"{prefix}{name}.")
        elif before != after:
            yield prefix + name
