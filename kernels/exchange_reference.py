"""What the exchange kernels compute, in plain PyTorch: the reference they are tested against.

Sizes: n rows of one A rank; K places (top-k) a row; H hidden; F FFN ranks of P experts each; R rows
received.  An id is negative where a place has no expert.
"""

from __future__ import annotations

import torch


def local_ids(expert_ids: torch.Tensor, ffn_rank: int, per_rank: int) -> torch.Tensor:
    """[n, K] global ids -> [n, K] int32 ids within FFN rank `ffn_rank`, -1 = not one of its own."""
    local = expert_ids.to(torch.int32) - ffn_rank * per_rank
    here = (expert_ids >= 0) & (local >= 0) & (local < per_rank)
    return torch.where(here, local, -1)


def reduce_places(
    outputs: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """[R, K, H] outputs of every row's experts -> [R, H], their sum by the router's weights.

    The sum runs in float32 over the places in order, so equal inputs give equal bits; what stands
    in a place without an expert is not looked at.  The result has the outputs' type.
    """
    total = torch.zeros(outputs.shape[0], outputs.shape[2], device=outputs.device)
    for place in range(outputs.shape[1]):
        term = outputs[:, place].float() * weights[:, place, None].float()
        total += torch.where(expert_ids[:, place, None] >= 0, term, 0.0)
    return total.to(outputs.dtype)


def sum_replies(replies: torch.Tensor, expert_ids: torch.Tensor, per_rank: int) -> torch.Tensor:
    """[F, n, H] rows that came back -> [n, H]: per row the sum over the FFN ranks it was sent to.

    The sum runs in float32 over the FFN ranks in order; the result has the replies' type.
    """
    total = torch.zeros(replies.shape[1:], device=replies.device)
    for ffn_rank in range(replies.shape[0]):
        sent = (local_ids(expert_ids, ffn_rank, per_rank) >= 0).any(dim=1, keepdim=True)
        total += torch.where(sent, replies[ffn_rank].float(), 0.0)
    return total.to(replies.dtype)


def drawn_ids(expert_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """[n, K] ids of a rank's rows, [S, cap, K] draws -> [S, cap, K]: the ids of emulated rows.

    Every emulated rank has a row where the real one has one that any expert wants.
    """
    held = torch.zeros(drawn.shape[1], 1, dtype=torch.bool, device=drawn.device)
    held[: expert_ids.shape[0], 0] = (expert_ids >= 0).any(dim=1)
    return torch.where(held, drawn, -1)
