"""Program: what the CPU platform has in place of SGLang's Triton kernels for drafts gives the same.

Triton's interpreter runs the kernels on a CPU; it must be chosen before SGLang is imported, so this
is a process of its own.  Ends with 0 and prints what was compared.
"""

from __future__ import annotations

import os

os.environ |= {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "SGLANG_AFD_CPU": "1"}

from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.kernels.ops.speculative.gather_spec_extras import gather_spec_extras
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens

from sglang_afd.platform import draft_slots, draft_trees, speculation
from sglang_afd.platform.draft_attention import branches

SHAPES = [(1, 1, 2), (3, 1, 4), (7, 1, 8), (1, 4, 4), (3, 2, 6), (3, 4, 16), (5, 3, 9)]
"""Steps, topk, tokens."""
WORDS = 3
"""Few, so that targets agree with drafts now and then."""


def same(found: Any, wanted: Any, what: str) -> None:
    """Raise unless the tensors of both are equal."""
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.long(), other.long()), f"{what}: {one} is not {other}"


def drafted(batch: int, steps: int, topk: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents and chosen candidates of trees that SGLang grows of random probabilities."""
    scores: list[torch.Tensor] = []
    words: list[torch.Tensor] = []
    parents: list[torch.Tensor] = []
    score, rows = None, batch
    for step in range(steps):
        probability = torch.rand(rows, topk)
        _, _, score, info = select_top_k_tokens(
            step, probability, torch.zeros(rows, topk).long(), None, score, topk
        )
        for kept, one in zip((scores, words, parents), info, strict=True):
            kept.append(one)
        rows = batch * topk
    parent_list, chosen, _ = organize_draft_results(scores, words, parents, tokens)
    return parent_list, chosen


def trees(shape: tuple[int, int, int], mode: int) -> None:
    """Build trees, and follow them."""
    steps, topk, count = shape
    lengths = torch.randint(1, 9, (3,))
    batch = len(lengths)
    parents, chosen = drafted(batch, steps, topk, count)

    def build(fn: Callable[..., None]) -> tuple[torch.Tensor, ...]:
        before = int(lengths.sum()) if mode == draft_trees.FULL_MASK else 0
        mask = torch.ones(count * before + batch * count**2, dtype=torch.bool)
        positions = torch.zeros(batch * count, dtype=torch.long)
        index, first, sibling = torch.full((3, batch, count), -1)
        lists = (index, first, sibling)
        kind = spec_tree.TreeMaskMode(mode)
        fn(parents, chosen, lengths, mask, positions, *lists, topk, steps, count, kind)
        return mask, positions, *lists

    built = build(draft_trees.build_tree)
    same(built, build(spec_tree.sgl_build_tree_kernel_triton), f"trees of {shape}")
    candidates, target = torch.randint(WORDS, (2, batch, count))

    def follow(fn: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        predicts = torch.zeros(batch * count, dtype=torch.int32)
        kept = torch.full((batch, steps + 1), -1, dtype=torch.int32)
        number = torch.empty(batch, dtype=torch.int32)
        fn(predicts, kept, number, candidates, *built[2:], target)
        return predicts, kept, number

    followed = follow(draft_trees.verify_greedy)
    same(followed, follow(spec_tree.verify_tree_greedy_triton), f"walks of {shape}")
    accepted(*followed, count=count)


def accepted(
    predicts: torch.Tensor, kept: torch.Tensor, number: torch.Tensor, *, count: int
) -> None:
    """What becomes of accepted nodes: their slots come to the front, their last token goes on."""
    batch, stride = kept.shape
    slots = torch.randint(1000, (batch * count,))
    ours, theirs = torch.zeros(2, batch * stride, dtype=torch.int64)
    draft_slots.of_accepted(kept, slots, ours, batch * stride)
    eagle.fill_accept_out_cache_loc_func(kept, slots, theirs, batch * stride)
    same([ours], [theirs], "slots of accepted nodes")
    ours, theirs = torch.zeros(2, batch * stride, dtype=torch.int64)
    draft_slots.of_first(number + 1, slots, ours)
    cache_locs.fill_front_out_cache_loc_func(number + 1, slots, theirs)
    same([ours], [theirs], "first slots")
    ours, theirs = torch.zeros(2, batch, dtype=torch.int32)
    tokens = predicts[kept.clamp(min=0).long()]
    draft_slots.last_accepted(tokens, number + 1, ours, stride, batch)
    eagle.fill_bonus_tokens_func(tokens, number + 1, theirs, stride, batch)
    same([ours], [theirs], "last tokens")


def kept() -> None:
    """What a draft goes on from, of the requests that are in the next step."""
    tables = (torch.rand(6, 2), torch.randint(99, (6, 2)), torch.randint(99, (6,)))
    rows = torch.tensor([4, 0, 5])
    for hidden in (torch.rand(6, 8), None):
        ours = speculation.rows_of(rows, *tables, hidden)
        theirs = gather_spec_extras(rows, *tables, hidden)
        assert (ours[3] is None) is (theirs[3] is None) is (hidden is None)
        for one, other in zip(ours, theirs, strict=True):
            assert one is None or torch.equal(one, other), "rows of kept state"


def slots(shape: tuple[int, int, int]) -> None:
    """Slots of the places that follow, reserved, listed, and seen by a draft's branches."""
    steps, topk, count = shape
    table = torch.arange(100, 340, dtype=torch.int32).view(4, 60)
    rows, lengths = torch.tensor([2, 0, 3]), torch.tensor([7, 1, 4])
    ours, theirs = torch.zeros(2, 3 * topk * steps, dtype=torch.int64)
    draft_slots.of_drafts(rows, table, lengths, ours, topk, steps)
    cache_locs.assign_draft_cache_locs_contiguous_func(rows, table, lengths, theirs, topk, steps)
    same([ours], [theirs], "slots of drafts")
    listed = draft_slots.of_places(
        req_pool_indices=rows,
        req_to_token=table,
        start_offset=lengths,
        end_offset=lengths + count,
    )
    wanted = torch.empty_like(listed)
    kernel = cache_locs.assign_extend_cache_locs
    kernel[(3,)](rows, table, lengths, lengths + count, wanted, table.shape[1], 4)
    same([listed], [wanted], "slots of places")
    new = torch.randint(1000, (3 * count,))
    tables = table.clone(), table.clone()
    draft_slots.reserve(rows, tables[0], lengths, lengths + count, new, 3)
    allocation.assign_req_to_token_pool_func(rows, tables[1], lengths, lengths + count, new, 3)
    same(tables[:1], tables[1:], "reserved slots")
    if steps > 1:
        seen_by_branches(table, rows, lengths, steps, topk)


def seen_by_branches(
    table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, steps: int, topk: int
) -> None:
    """The slots that each branch sees in each step of the draft."""
    batch = len(rows)
    indices = torch.zeros(steps, 500, dtype=torch.int32)
    starts = torch.zeros(steps, batch * topk + 1, dtype=torch.int32)
    kernel = cache_locs.generate_draft_decode_kv_indices
    kernel[(steps, batch, topk)](
        rows,
        table,
        lengths,
        indices,
        starts,
        lengths.repeat_interleave(topk),
        table.shape[1],
        indices.shape[1],
        starts.shape[1],
        4,
        8,
        64,
        1,
    )
    for step in range(steps - 1):
        ours, seen = branches(table[rows], lengths, topk=topk, steps=steps, ahead=step + 1)
        found = torch.cat([row[:n] for row, n in zip(ours, seen.tolist(), strict=True)])
        same([found], [indices[step, : len(found)]], f"what branches see in step {step}")
        same([seen], [starts[step].diff()], f"how much branches see in step {step}")


def main() -> None:
    """Compare everything for every shape."""
    torch.manual_seed(7)
    for shape in SHAPES:
        for mode in (draft_trees.FULL_MASK, draft_trees.TREE_ALONE):
            trees(shape, mode)
        slots(shape)
    kept()
    print(f"equal for {SHAPES}")


if __name__ == "__main__":
    main()
