"""The split plan's kernel in Triton's interpreter, against plain Python; see test_splits.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_afd.kernels.splits import most_splits, plan_size, plan_splits
from tests.support.splits import splits

pytestmark = pytest.mark.unit


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=40),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([78, 132, 148]),
)
def test_plan_is_the_cheapest_of_its_kind(
    lengths: list[int], kv_heads: int, processors: int
) -> None:
    most = most_splits(len(lengths), kv_heads, processors)
    given = torch.tensor(lengths, dtype=torch.int32)
    plan = plan_splits(given, kv_heads=kv_heads, processors=processors, most=most)
    count, rounded = len(lengths), (plan_size(len(lengths)) - 1) // 4
    assert plan.shape == (plan_size(count),) and plan.dtype == torch.int32
    parts = plan[:-1].view(4, rounded)[:, :count]
    assert parts[0].tolist() == splits(lengths, kv_heads, processors, most)
    assert int(parts[0].min()) >= 1 and int(parts[0].max()) <= most
    assert parts[1].tolist() == [1] * count
    assert parts[2].tolist() == list(range(count))
    assert int(parts[3].min()) >= 1 and int(parts[3].max()) <= kv_heads
    assert int(plan[-1]) == 0
