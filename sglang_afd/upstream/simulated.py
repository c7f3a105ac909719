"""Simulated acceptance: a mean number of tokens a verify step, for studies of speed alone.

SGLang has this (`SGLANG_SIMULATE_ACC_LEN`): each verify step of a batch gives the mean rounded down
or up, drawn so that it comes out.  Here the mean is a flag's, and the draws have a seed of their
own: the ranks of an attention group draw alike, whatever else they draw.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sglang_afd.config import AfdConfig
from sglang_afd.upstream.hooks import Hook, Kind

_METHOD, _TOKENS = "match-expected", "real-draft-token"


def _drawn(seed: int) -> Callable[[float, str, int], int]:
    """How many tokens the next verify step gives, in place of SGLang's own draw."""
    draw = random.Random(seed)

    def tokens(mean: float, method: str, most: int) -> int:
        assert method == _METHOD, method
        mean = max(1.0, min(float(most), mean))
        fewer = int(mean)
        return fewer + (draw.random() < mean - fewer)

    return tokens


def _accepting(mean: float) -> Callable[..., Any]:
    """A verify step that accepts as many tokens as `mean` says."""

    def verify(
        original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from sglang.srt.speculative import spec_utils

        # SGLang reads these in every call, and sets them from its environment when it is imported
        spec_utils.SIMULATE_ACC_LEN = mean
        if worker.topk == 1:  # the draft's tokens: experts get rows as in real text
            spec_utils.SIMULATE_ACC_TOKEN_MODE = _TOKENS
        return original(worker, batch, *args, **kwargs)

    return verify


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """None without --afd-spec-sim-accept."""
    if config.spec_sim_accept is None:
        return ()
    return (
        Hook(
            "sglang.srt.speculative.spec_utils.sample_simulated_acc_len",
            Kind.REPLACE,
            _drawn(config.spec_sim_seed),
            "draws with a seed of their own",
        ),
        Hook(
            "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify",
            Kind.AROUND,
            _accepting(config.spec_sim_accept),
            "the mean is a flag's of one deployment, not an environment variable's",
        ),
    )
