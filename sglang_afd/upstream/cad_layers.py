"""CAD: what an attention rank has of the model: SGLang's attention layers, with its heads alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sglang_afd.context import current
from sglang_afd.topology import Mode, Role
from sglang_afd.upstream.cad_model import attention_layers, is_linear
from sglang_afd.upstream.hooks import Hook, Kind

_HEADS = ("tp_q_head_num", "tp_k_head_num", "tp_v_head_num")
_LINEAR_HEADS = ("num_q_heads", "num_k_heads", "num_v_heads", "q_dim", "k_dim", "v_dim")
_CONVOLUTION = "conv1d.weight"
_RECURRENT = {_CONVOLUTION: "conv_weights", "A_log": "A_log", "dt_bias": "dt_bias"}
"""The checkpoint's names of what SGLang's linear attention has as attributes."""


class AttentionModel(nn.Module):
    """All that an attention rank has of the model: its attention layers, which have no weights but
    those of a linear attention's recurrence."""

    whole: type[nn.Module]
    """The model's own class."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config, self.quant_config = config, quant_config
        self.start_layer = 0
        self.end_layer = getattr(config, "text_config", config).num_hidden_layers
        with torch.device("meta"):  # its layers are as the model makes them, its weights nowhere
            whole = self.whole(config, quant_config=quant_config, prefix=prefix)
        layers, ranks = attention_layers(whole), current().topology.attention_ranks
        for layer in layers:
            for heads in _LINEAR_HEADS if is_linear(layer) else _HEADS:
                setattr(layer, heads, getattr(layer, heads) // ranks)
            if is_linear(layer):
                for name in _RECURRENT.values():
                    of_all = getattr(layer, name)
                    shape = len(of_all) // ranks, *of_all.shape[1:]
                    own = torch.empty(shape, dtype=of_all.dtype)  # where SGLang's loader wants it
                    setattr(layer, name, nn.Parameter(own, requires_grad=False))
        self.layers = nn.ModuleDict({str(layer.layer_id): layer for layer in layers})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors of recurrences, which alone an attention rank reads.

        Raises:
            ValueError: the checkpoint lacks one, or has one that the layers have no place for.
        """
        linear = [number for number, layer in self.layers.items() if is_linear(layer)]
        missing = {(number, name) for number in linear for name in _RECURRENT}
        for name, value in weights:
            found = re.search(r"\.layers\.(\d+)\..*?\.(conv1d\.weight|A_log|dt_bias)$", name)
            if found is None or (found[1], found[2]) not in missing:
                raise ValueError(f"{current().name} has no place for {name}")
            layer: Any = self.layers[found[1]]
            own = getattr(layer, _RECURRENT[found[2]])
            own.data.copy_(_share(found[2], value, layer).view(own.shape))
            missing.discard((found[1], found[2]))
        if missing:
            raise ValueError(
                f"{current().name} found no {' of layer '.join(reversed(min(missing)))} "
                f"({len(missing)} tensors are missing): the checkpoint is incomplete"
            )

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """An attention rank runs `sglang_afd.cad.serve`, never a forward of its own."""
        raise RuntimeError("an attention rank has no model forward of its own")


def _share(name: str, value: torch.Tensor, layer: Any) -> torch.Tensor:
    """This rank's part of a recurrence's tensor: of the queries', keys' and values' channels each
    its share, or of the heads."""
    topology = current().topology
    ranks, index = topology.attention_ranks, topology.serving_world.index(current().rank)
    widths = [layer.q_dim * ranks, layer.k_dim * ranks, layer.v_dim * ranks]
    parts = value.split(widths) if name == _CONVOLUTION else [value]
    return torch.cat([part.chunk(ranks)[index] for part in parts])


def _attention_alone(
    result: tuple[type, str], *args: Any, **kwargs: Any
) -> tuple[type, str] | None:
    context = current()
    if context.config.mode is Mode.AFD or context.role is not Role.ATTENTION:
        return None
    return type("AttentionModel", (AttentionModel,), {"whole": result[0]}), result[1]


HOOKS = (
    Hook(
        "sglang.srt.model_loader.utils.get_model_architecture",
        Kind.AFTER,
        _attention_alone,
        "an attention rank has the model's attention layers alone",
    ),
)
