"""How long each kernel kind takes: a roofline with one efficiency for each kind.

Reading weights and computing with them add up (a decode step's GEMMs have few tiles, so little of
the one hides behind the other); core attention takes the longer of the two.
"""

from __future__ import annotations

import numpy as np

from sglang_afd.plan.profile import GpuProfile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.shape import ModelShape

_SAMPLED = 8
"""Bytes that sampling reads and writes of each logit: float32, twice."""


def core_seconds(
    shape: ModelShape,
    gpu: GpuProfile,
    requests: float,
    width: int,
    context: float,
    kv_itemsize: int,
) -> np.ndarray:
    """Core attention of each layer [layers]: the cache is read once for all of a request's rows.

    Args:
        width: rows of a request in the step (1; more in verify).
        context: mean tokens that a request holds.
    """
    cache = requests * context * shape.each("kv_elements") * kv_itemsize
    state = 2 * requests * shape.each("state_bytes")
    flops = requests * width * context * shape.each("score_flops")
    read = (cache + state) / (gpu.bandwidth * gpu.attention_efficiency)
    return np.maximum(read, flops / (gpu.bf16_flops * gpu.math_efficiency))


def dense_seconds(shape: ModelShape, gpu: GpuProfile, tokens: float, graphs: bool) -> np.ndarray:
    """Everything else on an attention rank but the head, of each layer [layers]."""
    parameters = shape.each("projections") + shape.each("dense") + shape.each("router")
    seconds = shape.layer_weight_bytes / (gpu.bandwidth * gpu.gemm_efficiency)
    seconds = seconds + 2 * tokens * parameters / (_flops(shape, gpu) * gpu.math_efficiency)
    seconds = seconds + shape.each("kernels") * gpu.kernel_seconds
    return seconds if graphs else seconds + gpu.eager_layer_seconds


def head_seconds(shape: ModelShape, gpu: GpuProfile, tokens: float) -> float:
    """The lm_head and sampling of a step."""
    moved = shape.head_bytes + tokens * shape.vocab * _SAMPLED
    flops = 2 * tokens * shape.vocab * shape.hidden
    math = flops / (gpu.bf16_flops * gpu.math_efficiency)
    return moved / (gpu.bandwidth * gpu.gemm_efficiency) + math + 8 * gpu.kernel_seconds


def expert_seconds(
    shape: ModelShape, gpu: GpuProfile, routing: Routing, tokens: float, owners: int
) -> np.ndarray:
    """The routed experts of one MoE layer on each of `owners` ranks [owners].

    Args:
        tokens: all ranks' tokens that this layer's experts serve at once.
    """
    touched = routing.touched(tokens, owners)
    return grouped_seconds(shape, gpu, touched, tokens * shape.top_k * routing.share(owners))


def grouped_seconds(
    shape: ModelShape, gpu: GpuProfile, touched: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Grouped GEMMs over `touched` experts and `rows` (token, expert) pairs, arrays alike."""
    activations = rows * activation_bytes_of_row(shape)
    moved = touched * shape.expert_bytes + activations
    flops = 6 * rows * shape.hidden * shape.intermediate
    return moved / (gpu.bandwidth * gpu.grouped_efficiency) + flops / (
        _flops(shape, gpu) * gpu.math_efficiency
    )


def activation_bytes_of_row(shape: ModelShape) -> float:
    """Memory traffic of a row through an expert: in, gate and up out and in, down in and out."""
    small = 1 if shape.fp8 else shape.itemsize
    inner = shape.intermediate * (4 * shape.itemsize + 2 * small)
    return shape.hidden * (small + shape.itemsize) + inner


def _flops(shape: ModelShape, gpu: GpuProfile) -> float:
    return gpu.fp8_flops if shape.fp8 else gpu.bf16_flops
