"""KV slots of speculative steps on the CPU platform, and the attention that reads through them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_afd.platform import draft_slots

pytestmark = pytest.mark.unit

ROWS = torch.tensor([2, 0])
"""Rows of the two requests in the table."""


def table() -> torch.Tensor:
    return torch.arange(100, 130, dtype=torch.int32).view(3, 10)


def test_slots_are_written_where_the_requests_go_on() -> None:
    slots = table()
    draft_slots.reserve(
        ROWS, slots, torch.tensor([3, 0]), torch.tensor([5, 3]), torch.tensor([7, 8, 1, 2, 3]), 2
    )
    expected = table()
    expected[2, 3:5] = torch.tensor([7, 8])
    expected[0, 0:3] = torch.tensor([1, 2, 3])
    assert torch.equal(slots, expected)


def test_slots_of_places() -> None:
    found = draft_slots.of_places(
        req_pool_indices=ROWS,
        req_to_token=table(),
        start_offset=torch.tensor([1, 4]),
        end_offset=torch.tensor([3, 5]),
        batch_size=2,
        draft_token_num=2,
        device="cpu",
    )
    assert found.tolist() == [121, 122, 104] and found.dtype == torch.int64


def test_slots_of_drafts_follow_the_prefix() -> None:
    out = torch.zeros(8, dtype=torch.int64)
    draft_slots.of_drafts(ROWS, table(), torch.tensor([3, 0]), out, 2, 2)
    assert out.tolist() == [123, 124, 125, 126, 100, 101, 102, 103]
    with pytest.raises(NotImplementedError, match="no positions"):
        draft_slots.of_drafts(ROWS, table(), torch.tensor([3, 0]), out, 2, 2, positions=out)


def test_accepted_slots_come_to_the_front() -> None:
    """Two requests of 4 nodes; the first accepted nodes 0 and 2, the second node 0 alone."""
    slots = torch.arange(10, 18)
    front, accepted = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    draft_slots.of_first(torch.tensor([2, 1]), slots, front)
    index = torch.tensor([[0, 2, -1], [4, -1, -1]], dtype=torch.int32)
    draft_slots.of_accepted(index, slots, accepted, 6)
    assert front.tolist() == [10, 11, 14, 0, 0, 0]
    assert accepted.tolist() == [10, 12, 14, 0, 0, 0]


def test_the_last_accepted_token_is_the_next_steps_first() -> None:
    tokens = torch.tensor([[5, 6, 9], [7, 9, 9]], dtype=torch.int32)
    last = torch.empty(2, dtype=torch.int32)
    draft_slots.last_accepted(tokens, torch.tensor([2, 1], dtype=torch.int32), last, 3, 2)
    assert last.tolist() == [6, 7]


def test_branches_see_the_prefix_and_their_own_slots() -> None:
    from sglang_afd.platform.draft_attention import branches

    rows, lengths = table()[ROWS], torch.tensor([3, 1])
    slots, seen = branches(rows, lengths, topk=2, steps=3, ahead=2)
    assert seen.tolist() == [5, 5, 3, 3]
    found = [row[:length].tolist() for row, length in zip(slots, seen)]
    assert found == [
        [120, 121, 122, 123, 124],
        [120, 121, 122, 126, 127],
        [100, 101, 102],
        [100, 104, 105],
    ]


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_tokens_to_verify_see_their_prefix_and_their_ancestors(padding: int, kv_heads: int) -> None:
    """A chain and a fork of 3 nodes, against attention written out node by node."""
    from sglang_afd.platform.draft_attention import verify

    torch.manual_seed(3)
    heads, size, count, prefixes = 2, 4, 3, [4, 2]
    slots = torch.randperm(40)[:30].view(3, 10)
    keys, values = torch.randn(2, 40, kv_heads, size)
    ancestors = [[[0], [0, 1], [0, 1, 2]], [[0], [0, 1], [0, 2]]]
    masks = []
    for prefix, nodes in zip(prefixes, ancestors, strict=True):
        mask = torch.zeros(count, prefix + count, dtype=torch.bool)
        mask[:, :prefix] = True
        for node, seen in enumerate(nodes):
            mask[node, [prefix + other for other in seen]] = True
        masks.append(mask.flatten())
    q = torch.randn(2 * count + padding, heads * size)
    k, v = torch.randn(2, 2 * count + padding, kv_heads * size)
    written: list[Any] = []
    pool = SimpleNamespace(
        set_kv_buffer=lambda *args: written.append(args),
        get_key_buffer=lambda layer: keys,
        get_value_buffer=lambda layer: values,
    )
    backend = SimpleNamespace(
        token_to_kv_pool=pool,
        swa_out_cache_loc=None,
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        qk_head_dim=size,
        v_head_dim=size,
        scaling=0.5,
    )
    batch = SimpleNamespace(
        out_cache_loc=torch.zeros(2 * count + padding),
        req_pool_indices=torch.cat([ROWS, ROWS.new_zeros(padding)]),
        seq_lens=torch.tensor([*prefixes, *[1] * padding]),
        spec_info=SimpleNamespace(
            draft_token_num=count,
            retrieve_index=torch.zeros(2, count),
            custom_mask=torch.cat(masks),
        ),
    )
    out = verify(backend, q, k, v, layer, batch)
    assert len(written) == 1 and out.shape == q.shape
    for request, prefix in enumerate(prefixes):
        for node, seen in enumerate(ancestors[request]):
            places = [*range(prefix), *(prefix + other for other in seen)]
            mine = slots[ROWS[request], places]
            row = request * count + node
            for head in range(heads):
                kv = head * kv_heads // heads
                query = q[row, head * size : (head + 1) * size]
                weights = (keys[mine, kv] @ query * layer.scaling).softmax(0)
                want = weights @ values[mine, kv]
                got = out[row, head * size : (head + 1) * size]
                torch.testing.assert_close(got, want)
