"""What a server answers: greedy continuations, and its ranks of given tokens (teacher forcing).

An answer that is refused, truncated or not finite raises `Unanswered`; none is ever left out.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import urllib.error
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from sglang_afd.observe.recording import request_id

TOP = 100
"""Tokens that are looked at beside a given one."""
BEYOND = TOP + 1
"""Rank of a token that is not among the `TOP`."""
_AT_ONCE = 16
_T = TypeVar("_T")
_R = TypeVar("_R")


class Continuation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt and what it was continued with, greedily."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    """Of every token, in nats."""
    gaps: list[float] = []
    """By how much every token leads the second best, in nats; empty where nobody asked."""


class Forced(msgspec.Struct, kw_only=True):
    """How a server sees tokens that it is given: one entry a token in each list."""

    ranks: list[int]
    """1: no token is more likely; `BEYOND`: more than `TOP` are."""
    margins: list[float]
    """By how much the server's best token leads the given one, in nats."""
    logprobs: list[float]


class Unanswered(RuntimeError):
    """A request that was refused, or whose answer is truncated or not finite."""


class Answering(Protocol):
    """What is asked: `sglang_afd.running.Server`, or what stands in for one."""

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        """GET `path`, or POST `body` to it; the decoded JSON answer."""


def random_prompts(lengths: Sequence[int], *, vocab: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids (3 and up: ids below may be special)."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab) for _ in range(length)] for length in lengths]


def ask_all(
    ask: Callable[[_T], _R], items: Sequence[_T], tick: Callable[[], None] = lambda: None
) -> list[_R | Unanswered]:
    """`ask` every item, several at the same time; the answers in the items' order.

    Args:
        tick: called as often as there are items, whenever one more is done.
    """

    def one(item: _T) -> _R | Unanswered:
        try:
            return ask(item)
        except Unanswered as problem:
            return problem
        except (LookupError, TypeError) as error:  # an answer of another shape
            return Unanswered(f"malformed answer: {error!r}")
        finally:
            tick()

    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(items)))) as pool:
        return list(pool.map(one, items))


def continue_greedily(
    server: Answering, prompts: Sequence[list[int]], *, tokens: int
) -> list[Continuation]:
    """Let `server` continue all prompts by `tokens` tokens each.

    Raises:
        Unanswered: for the first prompt that it did not continue.
    """
    return answered(ask_all(lambda prompt: continued(server, prompt, tokens), prompts))


def answered(results: Sequence[_R | Unanswered]) -> list[_R]:
    """`results` if all of them are answers.

    Raises:
        Unanswered: the first one that is none.
    """
    good: list[_R] = []
    for result in results:
        if isinstance(result, Unanswered):
            raise result
        good.append(result)
    return good


def continued(
    server: Answering,
    prompt: list[int],
    tokens: int,
    *,
    record_as: int | None = None,
    timeout: float = 600,
) -> Continuation:
    """The greedy continuation of one prompt; the end token does not end it.

    Args:
        record_as: the number that the server is to record the request's MoE layers under.

    Raises:
        Unanswered: the request was refused, or the answer is truncated or not finite.
    """
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    if record_as is not None:
        nonce = uuid.uuid4().hex
        body["rid"] = request_id(record_as, nonce)
        body["extra_key"] = nonce  # a prefix out of the cache would not be computed, nor recorded
    answer = post(server, "/generate", body, timeout)
    meta = answer["meta_info"]
    reason = (meta.get("finish_reason") or {}).get("type")
    check_length(len(answer["output_ids"]), tokens, reason)
    given = meta["output_token_logprobs"]
    top = meta["output_top_logprobs"]
    check_length(len(given), tokens, "logprobs")
    check_length(len(top), tokens, "top logprobs")
    logprobs = finite([entry[0] for entry in given])
    for entries in top:
        finite([entry[0] for entry in entries])
    gaps = [entries[0][0] - entries[1][0] for entries in top]
    return Continuation(prompt=prompt, tokens=answer["output_ids"], logprobs=logprobs, gaps=gaps)


def forced(server: Answering, reference: Continuation, *, timeout: float = 600) -> Forced:
    """How `server` ranks the tokens of `reference`, each behind all that stands before it.

    Raises:
        Unanswered: the request was refused, or the answer is truncated or not finite.
    """
    count, start = len(reference.tokens), len(reference.prompt)
    body = {
        "input_ids": reference.prompt + reference.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": TOP,
    }
    meta = post(server, "/generate", body, timeout)["meta_info"]
    given = meta["input_token_logprobs"][-count:]
    top = meta["input_top_logprobs"][-count:]
    check_length(len(given), count, "logprobs of the prompt")
    check_length(len(top), count, "top logprobs of the prompt")
    if [entry[1] for entry in given] != reference.tokens:
        raise Unanswered("asked for the logprobs of given tokens, got those of other tokens")
    logprobs = finite([entry[0] for entry in given])
    ranks, margins = [], []
    for own, entries in zip(logprobs, top, strict=True):
        others = finite([entry[0] for entry in entries])
        if not others:
            raise Unanswered("a position came without its most likely tokens")
        better = sum(other > own for other in others)
        ranks.append(better + 1)
        margins.append(max(0.0, others[0] - own))
    return Forced(ranks=ranks, margins=margins, logprobs=logprobs)


def finite(values: Sequence[Any]) -> list[float]:
    """`values`, if all are finite numbers; SGLang writes NaN as null.

    Raises:
        Unanswered: one is not.
    """
    wrong = [v for v in values if not isinstance(v, int | float) or not math.isfinite(v)]
    if wrong:
        raise Unanswered(f"{len(wrong)} of {len(values)} logprobs are not finite (NaN or infinite)")
    return [float(value) for value in values]


def check_length(found: int, asked: int, reason: object) -> None:
    """Raise `Unanswered` unless as many tokens came as were asked for."""
    if found != asked:
        raise Unanswered(f"truncated: {found} of {asked} tokens came ({reason})")


def post(server: Answering, path: str, body: dict[str, Any], timeout: float) -> Any:
    """POST `body`.

    Raises:
        Unanswered: the server refuses it, is gone, or does not answer in JSON in time.
    """
    try:
        return server.call(path, body, timeout=timeout)
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        raise Unanswered(f"refused with status {error.code}: {said}") from error
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise Unanswered(f"no answer: {type(error).__name__}: {error}") from error
