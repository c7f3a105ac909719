"""The reference is a running server with OpenAI's completions API, SGLang and vLLM among them."""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from pathlib import Path
from typing import Any

from sglang_afd import running
from sglang_afd.identity import checkpoint_content
from sglang_afd.progress import Waiting
from sglang_afd.validate.answers import (
    Continuation,
    Unanswered,
    ask_all,
    check_length,
    finite,
    post,
)
from sglang_afd.validate.settings import Settings
from sglang_afd.validate.sides import SideAnswers, SideFailed
from sglang_afd.validation.report import Identity

NO_LAYERS = "localisation is unavailable: a server asked by URL does not show its MoE layers"
KEY_ENV = "OPENAI_API_KEY"
_TOKEN_ID = "token_id:"  # how vLLM writes a token where it is asked for ids


class Remote:
    """A server that is running already."""

    def __init__(self, address: str) -> None:
        self.url = address.rstrip("/").removesuffix("/v1")

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        """As `sglang_afd.running.Server.call`."""
        key = os.environ.get(KEY_ENV)
        headers = {"authorization": f"Bearer {key}"} if key else None
        return running.call(self.url + path, body, timeout, headers)


def answer(settings: Settings, waiting: Waiting) -> SideAnswers:
    """Let the server continue every prompt.

    Raises:
        SideFailed: it is not there, or is no such server.
    """
    server = Remote(settings.reference)
    prompts = settings.prompts.prompts
    waiting.begin(f"Reference: {server.url}, {len(prompts)} prompts")
    try:
        model = server.call("/v1/models", timeout=30)["data"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SideFailed(
            "reference",
            f"{server.url}/v1/models does not answer as an OpenAI-compatible server does "
            f"({error}); check --reference, and {KEY_ENV} if it asks for a key",
        ) from error

    def one(prompt: list[int]) -> Continuation:
        return continued(server, model["id"], prompt, settings.new_tokens, settings.answer_timeout)

    results = ask_all(one, prompts, waiting.counting("reference: greedy prompts", len(prompts)))
    identity = Identity(
        kind="url",
        configuration={"url": server.url, "model": model, **_says(server)},
        checkpoint=_checkpoint(server, model),
        software={},
    )
    return SideAnswers(identity, results, NO_LAYERS)


def continued(
    server: Remote, model: str, prompt: list[int], tokens: int, timeout: float
) -> Continuation:
    """The greedy continuation of one prompt.

    Raises:
        Unanswered: it was refused, is truncated, is not finite, or comes without token ids.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 2,
        # Beyond OpenAI's API, as SGLang and vLLM have it.
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choice = post(server, "/v1/completions", body, timeout)["choices"][0]
    given = choice.get("logprobs") or {}
    ids = choice.get("token_ids") or _ids(given.get("tokens") or [])
    check_length(len(ids), tokens, choice.get("finish_reason"))
    logprobs = finite(given.get("token_logprobs") or [])
    check_length(len(logprobs), tokens, "logprobs")
    gaps = []
    for entries in given.get("top_logprobs") or []:
        best = sorted(finite(list((entries or {}).values())), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    if len(gaps) != tokens:
        gaps = []  # the lead is unknown, so that no divergence counts as a near-tie
    return Continuation(prompt=prompt, tokens=ids, logprobs=logprobs, gaps=gaps)


def _ids(tokens: list[str]) -> list[int]:
    if not all(token.startswith(_TOKEN_ID) for token in tokens):
        raise Unanswered(
            "the server gives text but no token ids, neither for return_token_ids nor for "
            "return_tokens_as_token_ids; take one that does, SGLang or vLLM for example"
        )
    return [int(token.removeprefix(_TOKEN_ID)) for token in tokens]


def _says(server: Remote) -> dict[str, Any]:
    """What the server says of its version; nothing where it does not."""
    for path in ("/version", "/model_info"):
        try:
            return {path: server.call(path, timeout=30)}
        except (OSError, ValueError):
            continue
    return {}


def _checkpoint(server: Remote, model: dict[str, Any]) -> dict[str, str]:
    """The content of the server's checkpoint, where it says it and it is on this machine."""
    if urllib.parse.urlsplit(server.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        return {}
    places = [model.get("root"), model.get("id")]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        places.insert(0, server.call("/model_info", timeout=30).get("model_path"))
    for place in places:
        if isinstance(place, str) and Path(place).is_absolute() and Path(place).is_dir():
            return checkpoint_content(Path(place))
    return {}
