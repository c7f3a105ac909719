"""HTTP requests that a server's own OpenAPI document describes, or just does not allow."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

BASE = "http://server"
LONGEST = 600.0  # seconds: what no request of a test takes, however slow the machine is


class Request(NamedTuple):
    """One request, as it goes over the wire; equal requests of two runs are equal."""

    method: str
    path: str
    """With its query."""
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def send(self, base_url: str, patience: float, progress: Callable[[], object]) -> int | None:
        """The answer's status; None: the connection was closed without one, or none came.

        None comes once `progress` has told the same for `patience` seconds: how long a generation
        takes is the machine's affair, and one that stands still has lost its request.
        """
        answers: queue.Queue[int | None] = queue.Queue()
        threading.Thread(target=lambda: answers.put(self._ask(base_url)), daemon=True).start()
        last, since = progress(), time.monotonic()
        while time.monotonic() < since + patience:
            with suppress(queue.Empty):
                return answers.get(timeout=min(1.0, patience / 4))
            if (now := progress()) != last:
                last, since = now, time.monotonic()
        return None

    def _ask(self, base_url: str) -> int | None:
        try:
            answer = requests.request(
                self.method,
                base_url + self.path,
                headers=dict(self.headers),
                data=self.body,
                timeout=LONGEST,
                stream=True,  # the status counts: a long answer may go on
            )
        except requests.RequestException:
            return None
        answer.close()
        return answer.status_code

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.body[:300]!r}"


def described(document: dict[str, Any], leave_out: frozenset[str], examples: int) -> list[Request]:
    """`examples` requests of every path that fit its description, and as many broken ones.

    Schemathesis's own way to break a request took 14 CPU seconds for each of
    ``/v1/chat/completions``.

    Args:
        document: the OpenAPI document.
        leave_out: paths that are not asked for.
        examples: the number, which is one where a path takes nothing.
    """
    paths = {
        path: {method: item[method] for method in _methods(item)}
        for path, item in document["paths"].items()
        if path not in leave_out
    }
    found: list[Request] = []
    for result in schemathesis.openapi.from_dict({**document, "paths": paths}).get_all_operations():
        operation = result.ok()
        definition = paths[operation.path][operation.method]
        takes = "requestBody" in definition or "parameters" in definition
        fitting = _generated(operation.as_strategy(), examples if takes else 1)
        found += fitting
        found += [_broken(request, place) for place, request in enumerate(fitting) if request.body]
    return found


def _methods(item: dict[str, Any]) -> list[str]:
    """POST where a path has it: GET and PUT are the same function then."""
    return ["post"] if "post" in item else [name for name in item if name != "head"]


def _generated(strategy: Any, examples: int) -> list[Request]:
    """The same requests every time."""
    found: list[Request] = []

    @seed(0)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Any) -> None:
        found.append(_request(case))

    collect()
    return found


_WRONG = (None, -1, 10**400, "\ud800", [], {}, [[1]], True, "", 1e308, "0" * 10_000)


def _broken(request: Request, place: int) -> Request:
    """`request` with a value of another kind in its body, or cut, as `place` says."""
    try:
        fields = json.loads(request.body)
    except ValueError:
        return request._replace(body=request.body[1:] + b"{")
    if not isinstance(fields, dict) or not fields or place % 4 == 3:
        return request._replace(body=request.body[: len(request.body) // 2])
    name = sorted(fields)[place % len(fields)]
    wrong = {**fields, name: _WRONG[(place + len(name)) % len(_WRONG)]}
    return request._replace(body=json.dumps(wrong).encode())


def _request(case: Any) -> Request:
    wanted = case.as_transport_kwargs(base_url=BASE)
    wanted.pop("cookies", None)
    names = ("method", "url", "params", "headers", "data", "json", "files")
    sent = requests.Request(**{k: v for k, v in wanted.items() if k in names}).prepare()
    assert sent.method is not None and sent.url is not None
    body = sent.body or b""
    headers = {k: v for k, v in sent.headers.items() if k.lower() != "content-length"}
    return Request(
        sent.method,
        sent.url.removeprefix(BASE),
        tuple(headers.items()),
        body.encode() if isinstance(body, str) else body,
    )
