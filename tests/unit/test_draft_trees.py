"""Trees of drafts on the CPU platform: built, followed greedily, and sampled with the right
distribution.  Trees and their walks are written down a second time here, node by node."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_afd.platform import draft_trees

pytestmark = pytest.mark.unit

VOCABULARY = 7


class Trees:
    """What SGLang hands to the kernels, for trees given by the candidates chosen of them."""

    def __init__(
        self, parent_list: Any, chosen: Any, lengths: list[int], topk: int, depth: int, mode: int
    ) -> None:
        chosen = torch.tensor(chosen)
        self.batch, self.count = chosen.shape[0], chosen.shape[1] + 1
        before = sum(lengths) if mode == draft_trees.FULL_MASK else 0
        size = self.count * before + self.batch * self.count**2
        self.mask = torch.ones(size, dtype=torch.bool)
        self.positions = torch.full((self.batch * self.count,), -7)
        self.index, self.next, self.sibling = torch.full((3, self.batch, self.count), -1)
        draft_trees.build_tree(
            torch.tensor(parent_list),
            chosen,
            torch.tensor(lengths),
            self.mask,
            self.positions,
            self.index,
            self.next,
            self.sibling,
            topk,
            depth,
            self.count,
            mode,
        )

    def masks(self, lengths: list[int]) -> list[list[list[bool]]]:
        parts = self.mask.split([self.count * (length + self.count) for length in lengths])
        return [part.view(self.count, -1).tolist() for part in parts]


def test_a_chain_is_a_tree() -> None:
    """Steps 3, topk 1: each token goes on from the one before."""
    lengths = [5, 2]
    trees = Trees([[-1, 0, 1]] * 2, [[0, 1, 2]] * 2, lengths, 1, 3, draft_trees.FULL_MASK)
    assert trees.index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert trees.next.tolist() == [[1, 2, 3, -1]] * 2
    assert trees.sibling.tolist() == [[-1] * 4] * 2
    assert trees.positions.tolist() == [5, 6, 7, 8, 2, 3, 4, 5]
    for mask, length in zip(trees.masks(lengths), lengths, strict=True):
        for node, row in enumerate(mask):
            assert row == [place <= length + node for place in range(length + 4)]


def test_one_step_has_no_parents() -> None:
    trees = Trees(torch.empty(1, 0).tolist(), [[0]], [4], 1, 1, draft_trees.TREE_ALONE)
    assert trees.next.tolist() == [[1, -1]] and trees.positions.tolist() == [4, 5]
    assert trees.mask.tolist() == [True, False, True, True]


def test_a_tree_of_two_branches() -> None:
    """topk 2: candidates 0 and 1 follow the root, 2 and 3 follow candidate 0, 4 and 5 candidate 1,
    6 and 7 candidate 2; chosen are 0, 1, 2, 4 and 6, which become nodes 1 to 5."""
    parent_list = [[-1, 0, 1, 2, 4]]
    trees = Trees(parent_list, [[0, 1, 2, 4, 6]], [3], 2, 3, draft_trees.TREE_ALONE)
    assert trees.next.tolist() == [[1, 3, 4, 5, -1, -1]]
    assert trees.sibling.tolist() == [[-1, 2, -1, -1, -1, -1]]
    assert trees.positions.tolist() == [3, 4, 4, 5, 5, 6]
    seen = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    rows = trees.mask.view(6, 6).tolist()
    assert [[j for j in range(6) if row[j]] for row in rows] == seen


def test_packed_masks_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="mode 2"):
        Trees([[-1]], [[0]], [1], 1, 1, 2)


FORK = {0: [1, 2], 1: [3], 2: [4], 3: [], 4: []}
"""Nodes of a tree -> their children."""


def lists(children: dict[int, list[int]], batch: int) -> tuple[torch.Tensor, ...]:
    """Index, first children and next siblings of `batch` equal trees."""
    count = len(children)
    first = [(nodes or [-1])[0] for nodes in children.values()]
    after = {a: b for nodes in children.values() for a, b in pairwise(nodes)}
    sibling = [after.get(node, -1) for node in range(count)]
    index = torch.arange(batch * count).view(batch, count)
    return index, torch.tensor([first] * batch), torch.tensor([sibling] * batch)


@pytest.mark.parametrize(
    ("after", "accepted", "said"),
    [
        ([5, 9, 9, 9, 9], [0], [5]),  # neither child
        ([3, 6, 9, 9, 9], [0, 1, 3], [3, 6, 9]),  # the first child, and its own
        ([3, 5, 9, 9, 9], [0, 1], [3, 5]),
        ([4, 9, 7, 9, 2], [0, 2, 4], [4, 7, 2]),  # the second child, and its own
        ([4, 9, 6, 9, 2], [0, 2], [4, 6]),  # 6 is a token of the other branch
    ],
)
def test_the_branch_that_the_target_predicts_is_accepted(
    after: list[int], accepted: list[int], said: list[int]
) -> None:
    """Tokens of the nodes: 1, then 3 and 4, then 6 and 7; `after` is what the target predicts."""
    batch, count, most = 2, len(FORK), 3
    index, first, sibling = lists(FORK, batch)
    predicts = torch.zeros(batch * count, dtype=torch.int32)
    kept = torch.full((batch, most), -1, dtype=torch.int32)
    number = torch.empty(batch, dtype=torch.int32)
    candidates = torch.tensor([[1, 3, 4, 6, 7], [1, 0, 0, 0, 0]])
    target = torch.tensor([after, [8] * count])
    draft_trees.verify_greedy(
        predicts, kept, number, candidates, index, first, sibling, target, topk=2
    )
    assert number.tolist() == [len(accepted) - 1, 0]
    assert kept[0].tolist() == accepted + [-1] * (most - len(accepted))
    assert kept[1].tolist() == [count, -1, -1], "the other request has its own nodes"
    assert predicts[accepted].tolist() == said and predicts[count] == 8


def sample(
    children: dict[int, list[int]],
    tokens: list[int],
    probs: torch.Tensor,
    number: int,
    most: int,
    **thresholds: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk `number` equal trees; returns what each accepted and said, -1 where nothing."""
    count = len(children)
    index, first, sibling = lists(children, number)
    predicts = torch.full((number * count,), -1, dtype=torch.int32)
    kept = torch.full((number, most), -1, dtype=torch.int32)
    lengths = torch.empty(number, dtype=torch.int32)
    target = probs.expand(number, *probs.shape).contiguous()
    draft_trees.sample_tree(
        predicts=predicts,
        accept_index=kept,
        accept_token_num=lengths,
        candidates=torch.tensor([tokens] * number),
        retrive_index=index,
        retrive_next_token=first,
        retrive_next_sibling=sibling,
        uniform_samples=torch.rand(number, count),
        uniform_samples_for_final_sampling=torch.rand(number),
        target_probs=target,
        draft_probs=torch.zeros_like(target),
        deterministic=True,
        **{"threshold_single": 1.0, "threshold_acc": 1.0, **thresholds},
    )
    return kept, lengths, predicts.view(number, count)


SAMPLES = 20_000
CRITICAL = 16.81  # of chi squared with 6 degrees of freedom, at 1 %


def chi_squared(found: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * len(found)
    counts = torch.bincount(found.long(), minlength=VOCABULARY).double()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("children", [{0: [1], 1: []}, FORK], ids=["chain", "fork"])
def test_sampled_tokens_have_the_targets_distribution(children: dict[int, list[int]]) -> None:
    """The first token that a request says, and the second of those that accepted the first."""
    torch.manual_seed(11)
    count = len(children)
    probs = torch.rand(count, VOCABULARY).softmax(-1)
    tokens = [0, 3, 5, 1, 2][:count]
    kept, _, said = sample(children, tokens, probs, SAMPLES, most=count)
    assert chi_squared(said[:, 0], probs[0].double()) < CRITICAL
    for node in children[0]:
        chosen = said[(kept[:, 1] >= 0) & (kept[:, 1] % count == node)]
        assert len(chosen) > SAMPLES / 20
        assert bool((chosen[:, 0] == tokens[node]).all())
        assert chi_squared(chosen[:, node], probs[node].double()) < CRITICAL


def test_a_walk_that_is_full_samples_of_the_whole_distribution() -> None:
    """After the last place nothing was refused, so nothing is left out."""
    torch.manual_seed(12)
    probs = torch.zeros(2, VOCABULARY)
    probs[0, 3], probs[1] = 1.0, torch.rand(VOCABULARY).softmax(-1)
    kept, lengths, said = sample({0: [1], 1: []}, [0, 3], probs, SAMPLES, most=2)
    assert bool((lengths == 1).all()) and bool((kept[:, 1] >= 0).all())
    assert chi_squared(said[:, 1], probs[1].double()) < CRITICAL


def test_thresholds_accept_more() -> None:
    torch.manual_seed(13)
    probs = torch.full((2, VOCABULARY), 1 / VOCABULARY)
    rates = [
        float(sample({0: [1], 1: []}, [0, 3], probs, 2000, most=2, **more)[1].double().mean())
        for more in ({}, {"threshold_acc": 0.5}, {"threshold_single": 0.1})
    ]
    assert rates[0] == pytest.approx(1 / 7, abs=0.03)
    assert rates[1] == pytest.approx(2 / 7, abs=0.03)
    assert rates[2] == 1.0


def test_a_token_without_probability_is_never_said() -> None:
    torch.manual_seed(14)
    probs = torch.zeros(2, VOCABULARY)
    probs[:, [2, 6]] = 0.5
    _, lengths, said = sample({0: [1], 1: []}, [0, 3], probs, 2000, most=2, threshold_single=0.0)
    assert not bool(lengths.any()) and set(said[:, 0].tolist()) == {2, 6}


rows = st.lists(st.floats(0.01, 1), min_size=VOCABULARY, max_size=VOCABULARY)


@given(rows, st.integers(1, VOCABULARY + 3))
@settings(max_examples=50)
def test_top_k_keeps_the_largest(row: list[float], k: int) -> None:
    probs = torch.tensor([row]) / sum(row)
    kept = draft_trees.keep_top_k(probs, torch.tensor([k]))
    assert kept.sum().item() == pytest.approx(1, abs=1e-5)
    least = probs.sort(descending=True).values[0, min(k, VOCABULARY) - 1]
    assert (kept > 0).tolist() == (probs >= least).tolist()


@given(rows, st.floats(0.05, 1))
@settings(max_examples=50)
def test_top_p_keeps_the_fewest_that_are_enough(row: list[float], p: float) -> None:
    probs = torch.tensor([row]) / sum(row)
    kept = draft_trees.keep_top_p(probs, torch.tensor([p]))
    assert kept.sum().item() == pytest.approx(1, abs=1e-5)
    mass = float(probs[kept > 0].sum())
    least = float(probs[kept > 0].min())
    assert mass >= p - 1e-5 and mass - least < p + 1e-5
