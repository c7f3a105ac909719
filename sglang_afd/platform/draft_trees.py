"""Token trees of speculative decoding in PyTorch: built, checked greedily, and sampled from.

SGLang has CUDA kernels for these.  A request's tree has N nodes: node 0 is its last accepted
token, the others are drafted.  Trees are written as left-child right-sibling lists:
``next_token[node]`` is a node's first child, ``next_sibling[node]`` its next sibling, -1 is none.
Nodes of a batch are numbered on: node n of request b is ``b * N + n`` wherever an index names one.
"""

from __future__ import annotations

import torch

FULL_MASK = 0
"""A request's mask has its prefix before its tree: [N, prefix + N]."""
TREE_ALONE = 1
"""A request's mask is of its tree: [N, N]."""


def build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Write the trees of a batch into the tensors given.

    Args:
        parent_list: [b, *], which candidate the k-th group of `topk` candidates goes on from.
        top_scores_index: [b, N - 1], ascending: the candidates that are nodes 1 to N - 1.
        seq_lens: [b], lengths of the prefixes.
        tree_mask: flat, the requests' masks one after the other, all True where a prefix is:
            whether a node (row) sees a place (column).
        positions: [b * N], of the nodes in their sequences.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [b, N]; the latter two all -1.

    Raises:
        NotImplementedError: the mask is to be packed into bits.
    """
    if tree_mask_mode not in (FULL_MASK, TREE_ALONE):
        raise NotImplementedError(f"no masks of mode {tree_mask_mode} on the CPU platform")
    count, begin = num_verify_tokens, 0
    for request, length in enumerate(seq_lens.tolist()):
        nodes = range(count)
        parents = _parents(top_scores_index[request].tolist(), parent_list[request].tolist(), topk)
        children: dict[int, int] = {}
        for node in reversed(nodes[1:]):
            parent = parents[node]
            if parent is None:
                continue
            if parent in children:
                retrieve_next_sibling[request, node] = children[parent]
            children[parent] = node
            retrieve_next_token[request, parent] = node
        before = length if tree_mask_mode == FULL_MASK else 0
        size = count * (before + count)
        mask = tree_mask[begin : begin + size].view(count, before + count)[:, before:]
        begin += size
        mask.fill_(False)
        mask[:, 0] = True
        for node in nodes:
            retrieve_index[request, node] = request * count + node
            path = _path(node, parents, spec_steps)
            mask[node, path] = True
            positions[request * count + node] = length + len(path)


def _parents(chosen: list[int], parent_list: list[int], topk: int) -> list[int | None]:
    """The parent of each node; None: of the first, and of those whose parent was not chosen."""
    node_of = {candidate: node for node, candidate in reversed(list(enumerate(chosen, 1)))}
    parents: list[int | None] = [None]
    for candidate in chosen:
        group = candidate // topk
        parents.append(node_of.get(parent_list[group]) if group else 0)
    return parents


def _path(node: int, parents: list[int | None], depth: int) -> list[int]:
    """`node` and its ancestors, node 0 not counted, `depth` at most."""
    path: list[int] = []
    at: int | None = node
    while at and len(path) < depth:
        path.append(at)
        at = parents[at]
    return path


def verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow each request's tree as long as a child is what the target predicts.

    Args:
        predicts: [b * N], written at the accepted nodes: what the target has after each.
        accept_index: [b, most], written: the accepted nodes, node 0 first; -1 remains behind them.
        accept_token_num: [b], written: how many there are, node 0 not counted.
        candidates: [b, N] tokens of the nodes.
        target_predict: [b, N] tokens that the target has after each node.

    Returns:
        `predicts`, `accept_index`, `accept_token_num`.
    """
    for request in range(candidates.shape[0]):
        wanted = target_predict[request].tolist()
        tokens = candidates[request].tolist()
        children = _children(retrieve_next_token[request], retrieve_next_sibling[request])
        at, accepted = 0, [0]
        while len(accepted) < accept_index.shape[1]:
            found = next((child for child in children[at] if tokens[child] == wanted[at]), None)
            if found is None:
                break
            at = found
            accepted.append(at)
        _write(
            request,
            accepted,
            [wanted[node] for node in accepted],
            predicts,
            accept_index,
            accept_token_num,
            retrieve_index,
        )
    return predicts, accept_index, accept_token_num


def sample_tree(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Follow each request's tree at random, so that the tokens have the target's distribution.

    A node's children are tried in order: a coin below the sum of the tried ones' probabilities
    accepts the last of them.  After the last accepted node a token is drawn of the target's
    distribution there, without the children that were refused.

    Args:
        predicts, accept_index, accept_token_num, candidates: as in `verify_greedy`.
        uniform_samples: [b, N] coins in [0, 1): a node's is for its children.
        uniform_samples_for_final_sampling: [b] coins.
        target_probs: [b, N, vocabulary] after each node.
        draft_probs: the same, all 0; written: the probabilities of refused children.
        threshold_single: a child of this probability is accepted whatever the coin.
        threshold_acc: divides the sum.
        deterministic: not used, the order of sums is always the same.
    """
    for request in range(candidates.shape[0]):
        tokens = candidates[request].tolist()
        coins = uniform_samples[request].tolist()
        children = _children(retrive_next_token[request], retrive_next_sibling[request])
        at, accepted, said = 0, [0], []
        while len(accepted) < accept_index.shape[1]:
            found, total = None, 0.0
            for child in children[at]:
                mine = float(target_probs[request, at, tokens[child]])
                total += mine
                if mine > 0 and (coins[at] < total / threshold_acc or mine >= threshold_single):
                    found = child
                    break
                draft_probs[request, at, tokens[child]] = mine
            if found is None:
                break
            said.append(tokens[found])
            at = found
            accepted.append(at)
        left = target_probs[request, at].double() - draft_probs[request, at].double()
        left = left.clamp(min=0)
        coin = float(uniform_samples_for_final_sampling[request])
        said.append(_draw(left, coin))
        _write(request, accepted, said, predicts, accept_index, accept_token_num, retrive_index)


def _draw(weights: torch.Tensor, coin: float) -> int:
    """The first token at which the sum of weights is over the coin's share of their sum."""
    sums = weights.cumsum(0)
    over = (sums > coin * sums[-1]).nonzero()
    if len(over):
        return int(over[0])
    possible = weights.nonzero()  # none is over: all weights are 0, or the coin was almost 1
    return int(possible[-1]) if len(possible) else len(weights) - 1


def _children(next_token: torch.Tensor, next_sibling: torch.Tensor) -> list[list[int]]:
    """The children of each node, in order."""
    first, sibling = next_token.tolist(), next_sibling.tolist()
    found: list[list[int]] = []
    for node in first:
        group = []
        while node != -1:
            group.append(node)
            node = sibling[node]
        found.append(group)
    return found


def _write(
    request: int,
    accepted: list[int],
    said: list[int],
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    retrieve_index: torch.Tensor,
) -> None:
    """Write what `request` has accepted, and the token that the target has after each node."""
    places = retrieve_index[request, accepted]
    accept_index[request, : len(accepted)] = places.to(accept_index.dtype)
    accept_token_num[request] = len(accepted) - 1
    predicts[places] = torch.tensor(said, dtype=predicts.dtype)


def keep_top_k(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """[n, vocabulary] with all but each row's `top_ks` largest set to 0, of sum 1 again."""
    ordered = probs.sort(dim=-1, descending=True).values
    last = (top_ks.long().clamp(1, probs.shape[-1]) - 1).unsqueeze(-1)
    kept = torch.where(probs >= ordered.gather(-1, last), probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def keep_top_p(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """[n, vocabulary] with the fewest largest kept whose sum is `top_ps`, of sum 1 again."""
    ordered, places = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = torch.where(before < top_ps.unsqueeze(-1), ordered, 0.0)
    kept = torch.zeros_like(probs).scatter(-1, places, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)
