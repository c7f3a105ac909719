"""The same requests to an endpoint, streamed: when the first token came, and the others."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.pair_identity import Endpoint


class BadWorkload(ValueError):
    """A workload file that cannot be used; the message says what to do."""


class Workload(msgspec.Struct, kw_only=True, frozen=True):
    """What both endpoints are asked, in this order."""

    prompts: list[list[int]]
    new_tokens: int
    concurrency: int


class Sample(msgspec.Struct, kw_only=True):
    """How one request went."""

    request: int
    tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    """Of the tokens after the first; None: there is one token at most."""
    failed: str = ""


class Round(msgspec.Struct, kw_only=True):
    """All requests, sent once."""

    seconds: float
    samples: list[Sample]
    exposed_ms: float | None
    """What the endpoint reports of its step that neither role's work explains; None: nothing."""


def read(file: Path, *, seed: int, new_tokens: int, concurrency: int) -> Workload:
    """The prompts of `file`, ``{"ids": [...]}`` a line as ``prompts`` writes them, in seeded order.

    Raises:
        BadWorkload: it cannot be read, or a line is no prompt.
    """
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise BadWorkload(f"{file} cannot be read: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            ids = msgspec.json.decode(line, type=dict[str, list[int]])["ids"]
        except (msgspec.MsgspecError, KeyError) as error:
            raise BadWorkload(f'{file}, line {number} is no {{"ids": [...]}}: {error}') from error
        if not ids:
            raise BadWorkload(f"{file}, line {number} holds no token")
        found.append(ids)
    if not found:
        raise BadWorkload(f"{file} holds no prompt")
    random.Random(seed).shuffle(found)
    return Workload(prompts=found, new_tokens=new_tokens, concurrency=concurrency)


def send(endpoint: Endpoint, workload: Workload, *, timeout: float) -> Round:
    """Every request once, `concurrency` at a time."""
    began = time.monotonic()
    numbers = range(len(workload.prompts))
    with ThreadPoolExecutor(workload.concurrency) as pool:
        samples = list(pool.map(lambda number: _one(endpoint, workload, number, timeout), numbers))
    seconds = time.monotonic() - began
    return Round(seconds=seconds, samples=samples, exposed_ms=_exposed(endpoint))


def _one(endpoint: Endpoint, workload: Workload, number: int, timeout: float) -> Sample:
    began = time.monotonic()
    came: list[tuple[float, int]] = []  # when, and how many tokens there were
    failed = ""
    try:
        for tokens in _stream(endpoint, workload.prompts[number], workload.new_tokens, timeout):
            came.append((time.monotonic(), tokens))
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        failed = f"{type(error).__name__}: {error}"
    if not came:
        return Sample(
            request=number, tokens=0, ttft_ms=None, tpot_ms=None, failed=failed or "no token came"
        )
    (first, at_first), (last, tokens) = came[0], came[-1]
    if not failed and tokens != workload.new_tokens:
        failed = f"{tokens} tokens came, not {workload.new_tokens}"
    return Sample(
        request=number,
        tokens=tokens,
        ttft_ms=(first - began) * 1000,
        tpot_ms=(last - first) * 1000 / (tokens - at_first) if tokens > at_first else None,
        failed=failed,
    )


def _stream(endpoint: Endpoint, ids: list[int], new_tokens: int, timeout: float) -> Iterator[int]:
    """How many tokens there are, whenever some more have come."""
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params, "stream": True}
    request = urllib.request.Request(
        f"{endpoint.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise ValueError(f"the endpoint answered with an error: {event['error']}")
            yield int(event["meta_info"]["completion_tokens"])


def _exposed(endpoint: Endpoint) -> float | None:
    try:
        info = endpoint.call("/server_info", timeout=60)
        value = info["internal_states"][0]["afd"]["exposed_ms"]
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return None
    return float(value)


def figures_of(rounds: Sequence[Round]) -> dict[str, Any]:
    """TTFT, TPOT and throughput over all rounds; None: there is nothing."""
    samples = [sample for each in rounds for sample in each.samples if not sample.failed]
    ttft = [sample.ttft_ms for sample in samples if sample.ttft_ms is not None]
    tpot = [sample.tpot_ms for sample in samples if sample.tpot_ms is not None]
    rates = rates_of(rounds)
    exposed = [each.exposed_ms for each in rounds if each.exposed_ms is not None]
    return {
        "median_ttft_ms": statistics.median(ttft) if ttft else None,
        "p99_ttft_ms": _p99(ttft),
        "median_tpot_ms": statistics.median(tpot) if tpot else None,
        "p99_tpot_ms": _p99(tpot),
        "tokens_per_s": statistics.median(rates) if rates else None,
        "exposed_ms": statistics.median(exposed) if exposed else None,
        "failed": sum(bool(sample.failed) for each in rounds for sample in each.samples),
    }


def rates_of(rounds: Sequence[Round]) -> list[float]:
    """Output tokens per second of each round."""
    return [sum(sample.tokens for sample in each.samples) / each.seconds for each in rounds]


def _p99(values: list[float]) -> float | None:
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)] if values else None
