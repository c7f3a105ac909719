"""Random requests whose answers must be those of their solo runs, whatever runs beside them."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tests.support.client import Answer, Client, request_body
from tests.support.processes import wait_until
from tests.support.reference import LOGPROB_TOLERANCE, Expect, Expected
from tests.support.workload import Prompt, prompts

LONGEST, MOST = 100, 60  # tokens of a prompt and of an answer
ENDS, MAY_END = {0, 2}, {"ignore_eos": False}
"""Tokens that end an answer of the embedded model, and a request that they may end: SGLang admits
more of those than fit, for it expects them to end early."""

STREAM, WHOLE, SEVERAL, ABORT, CONSTRAINED = "stream", "whole", "several", "abort", "constrained"
KINDS = (STREAM, WHOLE, SEVERAL, ABORT, CONSTRAINED)
"""A stream, which may hang up; an answer at once, with logprobs; two of them (n = 2); a stream that
is aborted by name; one whose text a regular expression constrains."""
_REGEX = r"[0-9]{3}-(yes|no)"
_AT_ONCE = 64  # requests that wait for their answers
_COPIES = 2


class Arrival(NamedTuple):
    """A request of a random run."""

    prompt: Prompt
    new_tokens: int
    gap: float
    """Seconds after the one before."""
    leaves_after: int | None
    """Chunks of its stream after which its client hangs up, or aborts it; None: it stays."""
    kind: str = STREAM
    fields: Mapping[str, Any] = {}
    """More of the request's fields."""


class Alone(NamedTuple):
    """What one prompt is answered when nothing runs beside it."""

    free: Expected
    """Up to `MOST` tokens; none ends it."""
    constrained: str | None = None
    ends: Set[int] = ENDS
    """Tokens that end it where it may end."""


def known_prompts(seed: int, distinct: int) -> list[Prompt]:
    """`distinct` random prompts, and twice as many that continue one of them."""
    draw = random.Random(seed)
    stems = prompts([draw.randint(1, LONGEST // 2) for _ in range(distinct)], seed=seed)
    tails = prompts([draw.randint(1, LONGEST // 2) for _ in range(2 * distinct)], seed=seed + 1)
    return [*stems, *(draw.choice(stems) + tail for tail in tails)]


def arrivals(
    known: Sequence[Prompt], seed: int, count: int, kinds: Sequence[str] = (STREAM,)
) -> list[Arrival]:
    """Random requests for prompts of `known`."""
    draw = random.Random(seed)

    def one() -> Arrival:
        kind = draw.choice(kinds)
        leaves = kind == ABORT or (kind == STREAM and draw.random() < 0.1)
        return Arrival(
            draw.choice(known),
            draw.choice((1, draw.randint(2, 10), draw.randint(10, MOST))),
            draw.choice((0.0, 0.0, draw.uniform(0.0, 0.06))),
            draw.randint(1, 8) if leaves else None,
            kind,
        )

    return [one() for _ in range(count)]


def answers_alone(
    client: Client,
    expect: Expect,
    known: Sequence[Prompt],
    *,
    constrained: bool,
    ends: Set[int] = ENDS,
) -> dict[Prompt, Alone]:
    """The reference's answers to `known`; those under a constraint are the idle server's own."""
    return {
        prompt: Alone(free, _ask_constrained(client, prompt, {}) if constrained else None, ends)
        for prompt, free in zip(known, expect(known, MOST), strict=True)
    }


def run(client: Client, made: Sequence[Arrival], alone: Mapping[Prompt, Alone]) -> list[str]:
    """Send all of `made` at their times; what is wrong with the answers, a line for each."""
    starts = [sum(a.gap for a in made[: i + 1]) for i in range(len(made))]
    begin = time.monotonic()

    def ask(index: int) -> str:
        arrival = made[index]
        time.sleep(max(0.0, begin + starts[index] - time.monotonic()))
        found = _ask(client, arrival, alone[arrival.prompt])
        return f"request {index} {arrival}: {found}" if found else ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [found for found in pool.map(ask, range(len(made))) if found]


def until_end(tokens: Sequence[int], ends: Set[int] = ENDS) -> tuple[int, ...]:
    """What comes of a request that may end."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tuple(tokens[: places[0] + 1] if places else tokens)


def used_tokens(client: Client) -> list[int]:
    """KV tokens in use on each attention rank."""
    return [load["num_used_tokens"] for load in client.get("/v1/loads").json()["loads"]]


def nothing_left(client: Client) -> None:
    """Every page of every rank can be had again."""
    response = client.post("/flush_cache", params={"timeout": 20})
    assert response.status_code == 200, response.text
    assert wait_until(lambda: not any(used_tokens(client)), 10), used_tokens(client)


def _ask(client: Client, arrival: Arrival, alone: Alone) -> str:
    """Send one request; what is wrong with its answer, if anything."""
    want = until_end(alone.free.tokens[: arrival.new_tokens], alone.ends)
    if arrival.kind == CONSTRAINED:
        text = _ask_constrained(client, arrival.prompt, arrival.fields)
        return "" if text == alone.constrained else f"{text!r}, alone {alone.constrained!r}"
    if arrival.kind in (STREAM, ABORT):
        return _streamed(client, arrival, want)
    several = arrival.kind == SEVERAL
    params = {**MAY_END, **({"n": _COPIES} if several else {})}
    body = request_body(
        arrival.prompt,
        arrival.new_tokens,
        sampling_params=params,
        return_logprob=True,
        **arrival.fields,
    )
    response = client.post("/generate", body)
    if response.status_code != 200:
        return f"{response.status_code}: {response.text}"
    answers = [Answer.of(one) for one in (response.json() if several else [response.json()])]
    if len(answers) != (_COPIES if several else 1):
        return f"{len(answers)} answers"
    for answer in answers:
        if answer.tokens != want:
            return f"{answer.tokens}, alone {want}"
        pairs = zip(answer.logprobs, alone.free.logprobs[: len(want)], strict=True)
        off = max((abs(here - there) for here, there in pairs), default=0.0)
        if off > LOGPROB_TOLERANCE:
            return f"a logprob is off by {off:.2e}"
    return ""


def _streamed(client: Client, arrival: Arrival, want: tuple[int, ...]) -> str:
    rid = {"rid": f"random-{id(arrival)}-{time.monotonic_ns()}"} if arrival.kind == ABORT else {}
    stream = client.stream(
        arrival.prompt, arrival.new_tokens, sampling_params=MAY_END, **rid, **arrival.fields
    )
    got: Sequence[int] = ()
    finish = None
    for chunk, body in enumerate(stream, 1):
        got, finish = body["output_ids"], body["meta_info"]["finish_reason"]
        if chunk == arrival.leaves_after:
            if arrival.kind == STREAM:
                stream.close()
                break
            client.post("/abort_request", rid)
    else:
        if finish is None:
            return "the stream ended without a reason"
    whole = finish is not None and finish["type"] != "abort"
    if not whole and arrival.leaves_after is None:
        return f"ended by {finish}"
    return "" if tuple(got) == (want if whole else want[: len(got)]) else f"{got}, alone {want}"


def _ask_constrained(client: Client, prompt: Prompt, fields: Mapping[str, Any]) -> str:
    params = {"regex": _REGEX, **MAY_END}
    return client.generate(prompt, 24, sampling_params=params, **fields).text
