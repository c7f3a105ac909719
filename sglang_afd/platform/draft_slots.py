"""Which KV slots the tokens of a speculative step have, in PyTorch.

SGLang has Triton kernels for these.  ``req_to_token`` is [requests, places]: the KV slot of each
place of a request's sequence; a request's row in it is named by ``req_pool_indices``, [b].
"""

from __future__ import annotations

from typing import Any

import torch


def reserve(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write the slots `out_cache_loc`, one request's after the other's, at places start to end."""
    begin = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        taken = out_cache_loc[begin : begin + end - start]
        req_to_token[row, start:end] = taken.to(req_to_token.dtype)
        begin += end - start


def of_places(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The slots at places start to end of each request, one request's after the other's."""
    parts = [
        req_to_token[row, start:end]
        for row, start, end in _spans(req_pool_indices, start_offset, end_offset)
    ]
    return torch.cat(parts).to(torch.int64)


def of_drafts(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Write into `out_cache_loc` the ``topk * num_cols`` slots that follow each request's prefix.

    Raises:
        NotImplementedError: positions are to be written too, which SGLang asks for on GPUs alone.
    """
    if positions is not None or mrope is not None:
        raise NotImplementedError("the CPU platform writes no positions with the drafts' slots")
    ends = seq_lens + topk * num_cols
    out_cache_loc.copy_(
        of_places(
            req_pool_indices=req_pool_indices,
            req_to_token=req_to_token,
            start_offset=seq_lens,
            end_offset=ends,
        )
    )


def of_first(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """Write the first ``num_front[i]`` slots of each request's equal share of `out_cache_loc`."""
    shares = out_cache_loc.view(num_front.numel(), -1)
    _fill(front_out_cache_loc, [share[:n] for share, n in zip(shares, num_front.tolist())])


def of_accepted(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """Write the slots of the nodes in `accept_index` that are not -1, in order."""
    nodes = accept_index.flatten()[:size].long()
    _fill(accept_out_cache_loc, [out_cache_loc[nodes[nodes >= 0]]])


def last_accepted(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last of each request's `accept_lens` tokens; a request has `accept_stride`."""
    rows = torch.arange(batch_size) * accept_stride
    picked = accept_tokens.flatten()[rows + accept_lens.long() - 1]
    bonus_tokens.copy_(picked.to(bonus_tokens.dtype))


def _fill(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    found = torch.cat(parts)
    out[: len(found)] = found.to(out.dtype)


def _spans(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
