"""What SGLang's ``--speculative-*`` flags ask for, as SGLang itself resolves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_afd.command_line import int_value, last_value, values

ALGORITHM = "--speculative-algorithm"
SERVED = "EAGLE3"
DRAFT = ("--speculative-draft-model-path", "--speculative-draft-model")
STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
TOKENS = "--speculative-num-draft-tokens"
SHAPE = (STEPS, TOPK, TOKENS)
_RUNNING = "--max-running-requests"
_MOST_RUNNING = 48
"""Requests at once, of all attention ranks together, if `_RUNNING` is not given."""
_STANDARD_STEPS, _STANDARD_TOPK, _STANDARD_TOKENS = 3, 1, 4


class Speculation(NamedTuple):
    """One way to speculate.

    draft: the draft checkpoint's directory; steps: forwards of the draft in a row; topk: tokens
    that each of them goes on with; tokens: of a request that one verify step checks, so rows that
    it sends into every MoE layer.
    """

    draft: str
    steps: int
    topk: int
    tokens: int


def asked(args: Sequence[str]) -> Speculation | None:
    """What SGLang's arguments `args` ask for; None: every step decodes one token of a request.

    Raises:
        ConfigError: a number is none.
    """
    if (last_value(args, ALGORITHM) or "").upper() != SERVED:
        return None
    draft = last_value(args, *DRAFT) or ""
    if not values(args, *SHAPE):
        return Speculation(draft, _STANDARD_STEPS, _STANDARD_TOPK, _STANDARD_TOKENS)
    steps, topk = int_value(args, STEPS, default=0), int_value(args, TOPK, default=0)
    # A chain has one token for each step, and the last accepted one; SGLang sets it so.
    tokens = steps + 1 if topk == 1 else int_value(args, TOKENS, default=0)
    return Speculation(draft, steps, topk, tokens)


def rows_needed(args: Sequence[str], attention_ranks: int, attention_tp: int) -> int:
    """Rows that a world rank sends in one verify step when it has as many requests as it may.

    0 without speculation: a step then has one row a request, and may go in slices.

    Raises:
        ConfigError: a number is none.
    """
    speculation = asked(args)
    if speculation is None:
        return 0
    running = int_value(args, _RUNNING, default=_MOST_RUNNING)
    requests = max(1, running // max(1, attention_ranks))  # as SGLang shares them out
    return -(-requests * speculation.tokens // max(1, attention_tp))
