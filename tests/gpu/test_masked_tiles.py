"""The masked grouped GEMM behind `deepep`: rows of an expert are whole tiles, or they run over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_afd.dispatch.buffers import deepep_cap
from sglang_afd.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _worst(rows: int, used: int) -> float:
    """The largest error of an output, relative to the outputs' spread, of 20 tries."""
    deep_gemm = pytest.importorskip("deep_gemm")
    experts, size, out = 32, 2048, 1536
    weights = torch.randn(experts, out, size, device="cuda").bfloat16()
    counts = torch.full((experts,), used, dtype=torch.int32, device="cuda")
    worst = 0.0
    for _ in range(20):
        hidden = torch.randn(experts, rows, size, device="cuda").bfloat16()
        found = torch.zeros(experts, rows, out, device="cuda", dtype=torch.bfloat16)
        deep_gemm.m_grouped_bf16_gemm_nt_masked(hidden, weights, found, counts, used)
        expected = torch.bmm(hidden[:, :used].float(), weights.float().transpose(1, 2))
        error = (found[:, :used].float() - expected).abs().max() / expected.std()
        worst = max(worst, float(error))
    return worst


def test_rows_in_whole_tiles_are_right(record_property: Any) -> None:
    for ranks, cap in ((2, 16), (2, 48), (3, 40), (6, 8)):
        rows = deepep_cap(Topology(ranks - 1, 1), cap) * ranks
        for used in (1, min(cap * ranks, rows), rows):
            assert _worst(rows, used) < 0.05, (rows, used)
    record_property("error with 32 rows, 20 used", f"{_worst(32, 20):.3f}")
