"""Talk to a server over HTTP, in the shapes that tests compare."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import requests

TIMEOUT = 240.0  # seconds for one request; nothing takes a tenth of it on a quiet machine


@dataclass(frozen=True)
class Answer:
    """What ``/generate`` returned for one sequence."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    """Of every output token; empty unless asked for."""
    dp_rank: int | None
    cached_tokens: int
    finish: str
    """``length``, ``stop`` or ``abort``."""
    meta: dict[str, Any]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answer:
        """Read the body of one sequence."""
        meta = body["meta_info"]
        return cls(
            tokens=tuple(body["output_ids"]),
            text=body.get("text", ""),
            logprobs=tuple(row[0] for row in meta.get("output_token_logprobs") or ()),
            dp_rank=meta.get("dp_rank"),
            cached_tokens=meta["cached_tokens"],
            finish=(meta["finish_reason"] or {}).get("type", ""),
            meta=meta,
        )


class Client:
    """A server at 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        """GET, whatever the status."""
        return requests.get(self.url + path, **{"timeout": TIMEOUT, **kwargs})

    def post(self, path: str, body: Any = None, **kwargs: Any) -> requests.Response:
        """POST `body` as JSON, whatever the status."""
        return requests.post(self.url + path, json=body, **{"timeout": TIMEOUT, **kwargs})

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int, **fields: Any) -> Answer:
        """Greedy continuation that ignores the end token; `fields` go into the request."""
        return Answer.of(self.generate_raw(prompt, max_new_tokens, **fields))

    def generate_raw(self, prompt: str | Sequence[int], max_new_tokens: int, **fields: Any) -> Any:
        """As `generate`: the body as it came, a list where the request makes several sequences."""
        response = self.post("/generate", request_body(prompt, max_new_tokens, **fields))
        assert response.status_code == 200, f"{response.status_code}: {response.text}"
        return response.json()

    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int, **fields: Any
    ) -> Generator[dict[str, Any], None, None]:
        """Stream ``/generate``: the body after every chunk.  Closing the iterator hangs up."""
        body = request_body(prompt, max_new_tokens, stream=True, **fields)
        with self.post("/generate", body, stream=True) as response:
            assert response.status_code == 200, f"{response.status_code}: {response.text}"
            yield from _events(response)

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        """One user message to ``/v1/chat/completions``; the response's body."""
        response = self.post("/v1/chat/completions", chat_body(content, **fields))
        assert response.status_code == 200, f"{response.status_code}: {response.text}"
        return response.json()

    def chat_stream(self, content: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Stream ``/v1/chat/completions``: every chunk."""
        body = chat_body(content, stream=True, **fields)
        with self.post("/v1/chat/completions", body, stream=True) as response:
            assert response.status_code == 200, f"{response.status_code}: {response.text}"
            yield from _events(response)


def request_body(prompt: str | Sequence[int], max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    """A ``/generate`` request: greedy unless `fields` holds other ``sampling_params``."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    params |= fields.pop("sampling_params", {})
    key = "text" if isinstance(prompt, str) else "input_ids"
    value = prompt if isinstance(prompt, str) else list(prompt)
    return {key: value, "sampling_params": params, **fields}


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    """A chat request with one user message: greedy, 32 tokens, unless `fields` says otherwise."""
    message = {"role": "user", "content": content}
    return {
        "model": "default",
        "messages": [message],
        "temperature": 0,
        "max_tokens": 32,
        **fields,
    }


def _events(response: requests.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])
