"""The requests whose answers must be equal everywhere, and how they are sent."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.client import Answer, Client

LENGTHS = (3, 17, 1, 64, 130, 300, 7, 40)  # tokens; mixed, one of a single token
NEW_TOKENS = 64
VOCABULARY = 2048  # of both checkpoints
_RESERVED = 16  # special tokens, and bytes that a tokenizer may not return
_STAGGER = 0.1  # seconds between arrivals

Prompt = tuple[int, ...]


def prompts(lengths: Sequence[int] = LENGTHS, *, seed: int = 1) -> list[Prompt]:
    """Random token ids: prompts of `lengths` tokens that share no prefix."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(_RESERVED, VOCABULARY) for _ in range(n)) for n in lengths]


def send(
    client: Client,
    asked: Sequence[Prompt],
    new_tokens: int | Sequence[int] = NEW_TOKENS,
    *,
    delays: Sequence[float] | None = None,
    fields: Callable[[int], dict[str, Any]] = lambda index: {},
) -> list[Answer]:
    """Send `asked` at different times, so that they join batches already running.

    Request i makes `new_tokens` (or ``new_tokens[i]``), leaves ``delays[i]`` seconds after the
    start, and has ``fields(i)`` added; logprobs of the output are always asked for.
    """
    lengths = [new_tokens] * len(asked) if isinstance(new_tokens, int) else list(new_tokens)
    waits = [_STAGGER * i for i in range(len(asked))] if delays is None else delays

    def one(index: int) -> Answer:
        time.sleep(waits[index])
        prompt, length = asked[index], lengths[index]
        return client.generate(prompt, length, return_logprob=True, **fields(index))

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(one, range(len(asked))))
