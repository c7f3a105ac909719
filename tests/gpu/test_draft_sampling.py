"""What the CPU platform samples of a tree of drafts is what SGLang's CUDA kernel samples.

Probabilities are multiples of 1/64 and coins lie between those, so that no sum is rounded and no
coin is near a bound: both must agree in every value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_afd.platform import draft_trees
from tests.unit.test_draft_trees import FORK, lists

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PARTS, WORDS, TREES = 64, 8, 2000
CHAIN = {0: [1], 1: [2], 2: [3], 3: []}


def drawn(children: dict[int, list[int]], seed: int) -> dict[str, Any]:
    """Arguments of the kernel for `TREES` trees with random tokens, probabilities and coins."""
    torch.manual_seed(seed)
    count = len(children)
    parts = torch.randint(WORDS, (TREES, count, PARTS))
    counts = torch.zeros(TREES, count, WORDS).scatter_add_(-1, parts, torch.ones(parts.shape))
    index, first, sibling = lists(children, TREES)
    words = torch.stack([torch.randperm(WORDS)[:count] for _ in range(TREES)])
    depth = 3 if children is FORK else count
    return {
        "predicts": torch.full((TREES * count,), -1, dtype=torch.int32),
        "accept_index": torch.full((TREES, depth), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(TREES, dtype=torch.int32),
        "candidates": words,
        "retrive_index": index,
        "retrive_next_token": first,
        "retrive_next_sibling": sibling,
        "uniform_samples": (torch.randint(PARTS, (TREES, count)) + 0.5) / PARTS,
        "uniform_samples_for_final_sampling": (torch.randint(PARTS, (TREES,)) + 0.37) / PARTS,
        "target_probs": counts / PARTS,
        "draft_probs": torch.zeros(TREES, count, WORDS),
    }


@pytest.mark.parametrize("children", [CHAIN, FORK], ids=["chain", "fork"])
@pytest.mark.parametrize("threshold_acc", [1.0, 0.5])
def test_the_reference_walks_as_the_kernel(
    children: dict[int, list[int]], threshold_acc: float
) -> None:
    sampling = pytest.importorskip("sglang.kernels.ops.speculative.sampling")
    ours = drawn(children, 5)
    theirs = {name: tensor.cuda() for name, tensor in drawn(children, 5).items()}
    draft_trees.sample_tree(**ours, threshold_acc=threshold_acc)
    sampling.tree_speculative_sampling_target_only(**theirs, threshold_acc=threshold_acc)
    accepted = ours["accept_token_num"]
    assert len(accepted.unique()) > 2, "trees are walked to different depths"
    for name in ("accept_token_num", "accept_index", "predicts", "draft_probs"):
        assert torch.equal(ours[name], theirs[name].cpu()), name
