"""Attention of speculative decoding on SGLang's PyTorch backend, which knows neither trees of
tokens that are verified nor drafts that are some steps ahead of their request's KV."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention


def verify(
    backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any
) -> torch.Tensor:
    """Attention of the tokens to verify: each sees its request's prefix and its own ancestors.

    Args:
        q, k, v: [tokens, width], N tokens of each request; rows that pad the batch may follow.

    Returns:
        [tokens, heads * head size].
    """
    pool, spec = backend.token_to_kv_pool, batch.spec_info
    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    count, begin = spec.draft_token_num, 0
    requests = spec.retrieve_index.shape[0]  # the batch may have padding ones besides
    rows = batch.req_pool_indices.tolist()[:requests]
    for request, (row, prefix) in enumerate(zip(rows, batch.seq_lens.tolist())):
        size = count * (prefix + count)
        mask = spec.custom_mask[begin : begin + size].view(count, prefix + count)
        begin += size
        mine = slice(request * count, (request + 1) * count)
        slots = backend.req_to_token_pool.req_to_token[row, : prefix + count]
        attended = scaled_dot_product_attention(
            queries[mine].movedim(0, 1).unsqueeze(0),
            keys[slots].movedim(0, 1).unsqueeze(0).to(q.dtype),
            values[slots].movedim(0, 1).unsqueeze(0).to(q.dtype),
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        out[mine] = attended.squeeze(0).movedim(1, 0)
    return out.view(q.shape[0], -1)


class _DraftStep(TorchNativeAttnBackend):
    """Decodes one step of the draft: `step` steps ahead of the requests' KV, in `topk` branches."""

    def __init__(self, runner: Any, topk: int, steps: int, step: int) -> None:
        super().__init__(runner)
        self._topk, self._steps, self._step = topk, steps, step
        self._pool = runner.req_to_token_pool

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the base class, over the branches as if each were a request."""
        *given, batch = args
        table, lengths = branches(
            self._pool.req_to_token[batch.req_pool_indices],
            batch.seq_lens,
            topk=self._topk,
            steps=self._steps,
            ahead=self._step + 1,
        )
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        seen = copy.copy(batch)
        seen.seq_lens, seen.req_pool_indices = lengths, torch.arange(len(lengths))
        return super().forward_decode(*given, seen, **kwargs)


def branches(
    rows: torch.Tensor, lengths: torch.Tensor, *, topk: int, steps: int, ahead: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KV slots of every branch of every request, and how many there are.

    A branch sees its request's prefix, and `ahead` slots of its own; the slots of all branches,
    `steps` each, follow the prefix.

    Args:
        rows: [b, places], the requests' slots; lengths: [b], of their prefixes.

    Returns:
        [b * topk, places], [b * topk].
    """
    table = rows.repeat_interleave(topk, dim=0)
    for index, length in enumerate(lengths.repeat_interleave(topk).tolist()):
        begin = length + index % topk * steps
        table[index, length : length + ahead] = rows[index // topk, begin : begin + ahead]
    return table, lengths.repeat_interleave(topk) + ahead


class DraftSteps:
    """What SGLang's draft worker asks for: an attention backend for each of its steps but the last,
    which runs no forward."""

    def __init__(self, runner: Any, topk: int, steps: int) -> None:
        self.attn_backends = [_DraftStep(runner, topk, steps, step) for step in range(steps - 1)]

    def init_forward_metadata(self, batch: Any) -> None:
        """Nothing: a step reads all that it needs off its own batch."""
