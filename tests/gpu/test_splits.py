"""FlashAttention-3 follows the split plan: the same attention, whatever the lengths."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sglang_afd.kernels.splits import most_splits, plan_splits
from tests.support.seeds import fresh_seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 4), (32, 4), (16, 8), (8, 1)])
@pytest.mark.parametrize("page", [1, 64])
def test_attention_by_the_plan_is_attention(
    heads: int, kv_heads: int, page: int, record_property: Any
) -> None:
    flash = pytest.importorskip("sgl_kernel.flash_attn")
    draw = random.Random(fresh_seed())
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    largest = 0.0
    for requests in (1, 2, 7, 33, 36, 100):
        lengths = [draw.choice((1, draw.randrange(1, 300), draw.randrange(1, 9000)))] + [
            draw.randrange(1, 9000) for _ in range(requests - 1)
        ]
        pages = [-(-length // page) for length in lengths]
        keys = torch.randn(sum(pages), page, kv_heads, 128, device="cuda").bfloat16()
        values = torch.randn_like(keys)
        order = torch.randperm(sum(pages), device="cuda", dtype=torch.int32)
        table = torch.zeros(requests, max(pages), dtype=torch.int32, device="cuda")
        for row, some in enumerate(order.split(pages)):
            table[row, : len(some)] = some
        queries = torch.randn(requests, heads, 128, device="cuda").bfloat16()
        given = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        most = most_splits(requests, kv_heads, processors)
        plan = plan_splits(given, kv_heads=kv_heads, processors=processors, most=most)
        common = {
            "q": queries,
            "k_cache": keys,
            "v_cache": values,
            "page_table": table,
            "cache_seqlens": given,
            "cu_seqlens_q": torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
            "max_seqlen_q": 1,
            "softmax_scale": 128**-0.5,
            "causal": True,
        }
        expected = flash.flash_attn_with_kvcache(**common)
        for _ in range(3):  # layers share a plan
            found = flash.flash_attn_with_kvcache(
                **common, scheduler_metadata=plan, num_splits=most
            )
            largest = max(largest, float((found.float() - expected.float()).abs().max()))
    record_property("largest difference", f"{largest:.5f}")
    assert largest < 0.01
