"""CAD, attention ranks: SGLang's attention backend and pools serve the steps of model ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sglang_afd.cad.serve import Layer
from sglang_afd.cad.tables import StepTables
from sglang_afd.context import current
from sglang_afd.upstream import cad_states
from sglang_afd.upstream.cad_memory import share_of_pool
from sglang_afd.upstream.cad_model import form_of, is_linear


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
            *mixed, a, b = own
            output = self._backend.forward(
                layer=layer, forward_batch=batch, mixed_qkv=torch.cat(mixed, dim=1), a=a, b=b
            )
            return output.reshape(len(own[0]), -1)
        q, k, v = own
        keys = k.view(len(k), layer.tp_k_head_num, layer.qk_head_dim)
        values = v.view(len(v), layer.tp_v_head_num, layer.v_head_dim)
        return self._backend.forward(q=q, k=keys, v=values, layer=layer, forward_batch=batch)
