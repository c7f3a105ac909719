"""The output projection: every A rank computes the logits of its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_afd.upstream.hooks import Hook, Kind


def _of_attention_group(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(*args, **{"use_attn_tp_group": True, **kwargs})


HOOKS = (
    Hook(
        "sglang.srt.layers.vocab_parallel_embedding.ParallelLMHead.__init__",
        Kind.AROUND,
        _of_attention_group,
        "under --enable-dp-lm-head logits come from the attention group; a model class that does "
        "not say so (MiniMax-M2) would shard its vocabulary over the whole world, F included",
    ),
)
