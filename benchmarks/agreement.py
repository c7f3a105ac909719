"""Do two servers give the same answers: greedy tokens, and ranks under teacher forcing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from sglang_afd.running import Server

NEAR_TIE = 0.25
"""Nats by which the top token may lead the reference's for their difference to be a near-tie."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and what a server continued it with, greedily."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def random_prompts(lengths: Sequence[int], *, vocab: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids (3 and up: ids below may be special)."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab) for _ in range(length)] for length in lengths]


def continue_greedily(
    server: Server, prompts: Sequence[list[int]], *, tokens: int
) -> list[Continuation]:
    """Let `server` continue all prompts at the same time by `tokens` tokens each."""

    def one(prompt: list[int]) -> Continuation:
        answer = server.call(
            "/generate",
            {
                "input_ids": prompt,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": tokens,
                    "ignore_eos": True,
                },
                "return_logprob": True,
            },
        )
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return Continuation(prompt, answer["output_ids"], logprobs)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def compare(server: Server, reference: Sequence[Continuation], *, tokens: int) -> dict[str, Any]:
    """Compare `server` with `reference`.

    Returns a record: prompts whose greedy tokens are all equal and where the others diverge; under
    teacher forcing with the reference's tokens, the share of positions whose top-1 token is the
    reference's, every differing position with its margin, and the largest logprob error.
    """
    own = continue_greedily(server, [c.prompt for c in reference], tokens=tokens)
    equal = sum(a.tokens == b.tokens for a, b in zip(own, reference, strict=True))
    divergences = [
        next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), None)
        for a, b in zip(own, reference, strict=True)
    ]
    with ThreadPoolExecutor(4) as pool:
        forced = list(pool.map(lambda c: _force(server, c), reference))
    positions = [position for prompt in forced for position in prompt]
    differing = [p for p in positions if p["margin"] > 0]
    return {
        "prompts": len(reference),
        "prompt_lengths": [len(c.prompt) for c in reference],
        "tokens_each": tokens,
        "greedy_equal_prompts": equal,
        "first_divergence": divergences,
        "forced_positions": len(positions),
        "forced_top1_share": 1 - len(differing) / len(positions),
        "forced_differing": differing,
        "largest_margin": max((p["margin"] for p in differing), default=0.0),
        "all_near_ties": all(p["margin"] <= NEAR_TIE for p in differing),
        "near_tie_nats": NEAR_TIE,
        "largest_logprob_error": max(p["logprob_error"] for p in positions),
        "mean_logprob_error": sum(p["logprob_error"] for p in positions) / len(positions),
    }


def _force(server: Server, reference: Continuation) -> list[dict[str, float]]:
    """One entry a reference token: how far the server's top token leads it, and the error."""
    start = len(reference.prompt)
    answer = server.call(
        "/generate",
        {
            "input_ids": reference.prompt + reference.tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "top_logprobs_num": 1,
        },
    )["meta_info"]
    given = answer["input_token_logprobs"][-len(reference.tokens) :]
    top = answer["input_top_logprobs"][-len(reference.tokens) :]
    result = []
    for index, token in enumerate(reference.tokens):
        if given[index][1] != token:
            raise RuntimeError(f"asked for the logprob of {token}, got that of {given[index][1]}")
        result.append(
            {
                "position": start + index,
                "margin": top[index][0][0] - given[index][0] if top[index][0][1] != token else 0.0,
                "logprob_error": abs(given[index][0] - reference.logprobs[index]),
            }
        )
    return result


def record(continuations: Sequence[Continuation]) -> list[dict[str, Any]]:
    """The raw data of a reference, for the results folder."""
    return [asdict(c) for c in continuations]
