"""Qwen3.5-MoE inside its vision model, as it is published: the language model is served alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang_afd.families.family import ExpertNames
from sglang_afd.families.qwen3_5_moe import FAMILY as TEXT
from sglang_afd.families.qwen3_5_moe import tensors

_EXPERTS = ExpertNames(stem="model.language_model", fused=True)

FAMILY = replace(
    TEXT,
    name="Qwen3.5-MoE",
    architectures=("Qwen3_5MoeForConditionalGeneration",),
    models="Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, without images",
    experts=_EXPERTS,
    tensors=partial(tensors, names=_EXPERTS),
    cpu="FP32: 1A1F, 2A1F, 2A2F",
    wrapped=True,
    unread=(*TEXT.unread, "model.visual."),
)
