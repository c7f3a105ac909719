"""CAD, attention ranks: SGLang's attention layers of this rank's heads, its backend and KV pool."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from sglang_afd.cad.serve import Layer
from sglang_afd.cad.tables import StepTables
from sglang_afd.context import current
from sglang_afd.topology import Mode, Role
from sglang_afd.upstream import cad_states
from sglang_afd.upstream.cad_memory import share_of_pool
from sglang_afd.upstream.cad_model import attention_layers, form_of, is_linear
from sglang_afd.upstream.hooks import Hook, Kind


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
        layers = attention_layers(whole)
        for layer in layers:
            if is_linear(layer):
                for name in _RECURRENT.values():
                    empty = torch.empty_like(getattr(layer, name), device=_device())
                    setattr(layer, name, nn.Parameter(empty, requires_grad=False))
            else:
                for heads in ("tp_q_head_num", "tp_k_head_num", "tp_v_head_num"):
                    own = getattr(layer, heads) // current().topology.attention_ranks
                    setattr(layer, heads, own)
        self.layers = nn.ModuleDict({str(layer.layer_id): layer for layer in layers})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors of recurrences, which alone an attention rank reads.

        Raises:
            ValueError: the checkpoint lacks one, or has one that the layers have no place for.
        """
        missing = {
            (layer, name)
            for layer, module in self.layers.items()
            if is_linear(module)
            for name in _RECURRENT
        }
        for name, value in weights:
            found = re.search(r"\.layers\.(\d+)\..*?\.(conv1d\.weight|A_log|dt_bias)$", name)
            if found is None or (found[1], found[2]) not in missing:
                raise ValueError(f"{current().name} has no place for {name}")
            own = getattr(self.layers[found[1]], _RECURRENT[found[2]])
            own.data.copy_(value.view(own.shape))
            missing.discard((found[1], found[2]))
        if missing:
            raise ValueError(
                f"{current().name} found no {' of layer '.join(reversed(min(missing)))} "
                f"({len(missing)} tensors are missing): the checkpoint is incomplete"
            )

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """An attention rank runs `sglang_afd.cad.serve`, never a forward of its own."""
        raise RuntimeError("an attention rank has no model forward of its own")


_RECURRENT = {"conv1d.weight": "conv_weights", "A_log": "A_log", "dt_bias": "dt_bias"}
"""The checkpoint's names of what SGLang's linear attention has as attributes."""


def _device() -> torch.device:
    """Where SGLang's loader has new tensors made."""
    return torch.empty(0).device


class Attend:
    """Runs SGLang's attention backend of this rank for steps of model ranks."""

    def __init__(self, runner: Any) -> None:
        self._backend, self._page = runner.attn_backend, runner.page_size
        self._pool = runner.req_to_token_pool
        self._table = self._pool.req_to_token
        self._device = runner.device
        self._planned: Any = None
        """The batch that the backend's metadata are of."""
        self.layers = [
            Layer(form_of(layer), partial(self._run, layer))
            for layer in runner.model.layers.values()
        ]

    def begin(self, steps: dict[int, StepTables]) -> dict[int, Any]:
        """The batches of a step, by model rank; writes their slots into this rank's table."""
        self._planned, batches, row = None, {}, 0
        for rank, step in steps.items():
            rows = range(row, row + len(step.lengths))
            base = share_of_pool(current().topology.leading_world.index(rank))
            for place, slots in zip(rows, step.table(self._page, base.tokens), strict=True):
                self._table[place, : len(slots)] = slots
            states = cad_states.take(step, self._pool, rows, base.states)
            batches[rank] = self._batch(step, rows, base.tokens, states)
            row = rows.stop
        return batches

    def _batch(self, step: StepTables, rows: range, base: int, states: dict[str, Any]) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        to = self._device
        prefix = step.lengths - step.new
        extends: dict[str, Any] = {}
        if step.extends:
            extends = {
                "extend_num_tokens": len(step.slots),
                "extend_seq_lens": step.new.to(to),
                "extend_prefix_lens": prefix.to(to),
                "extend_start_loc": (step.new.cumsum(0) - step.new).to(to),
                "extend_seq_lens_cpu": step.new.tolist(),
                "extend_prefix_lens_cpu": prefix.tolist(),
            }
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND if step.extends else ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=torch.empty(0, dtype=torch.int64, device=to),
            req_pool_indices=torch.tensor(rows, device=to),
            seq_lens=step.lengths.to(to),
            seq_lens_cpu=step.lengths,
            seq_lens_sum=int(step.lengths.sum()),
            out_cache_loc=(step.slots + base).to(to),
            **extends,
            **states,
        )

    def _run(self, layer: Any, batch: Any, *inputs: torch.Tensor) -> torch.Tensor:
        own = [rows.contiguous().to(self._device) for rows in inputs]
        if self._planned is not batch:
            self._backend.init_forward_metadata(batch)
            self._planned = batch
        if is_linear(layer):
            names = ("mixed_qkv", "a", "b")
            output = self._backend.forward(
                layer=layer, forward_batch=batch, **dict(zip(names, own, strict=True))
            )
            return output.reshape(len(own[0]), -1)
        q, k, v = own
        keys = k.view(len(k), layer.tp_k_head_num, layer.qk_head_dim)
        values = v.view(len(v), layer.tp_v_head_num, layer.v_head_dim)
        return self._backend.forward(q=q, k=keys, v=values, layer=layer, forward_batch=batch)


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
