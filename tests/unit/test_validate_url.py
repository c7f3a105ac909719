"""A reference by URL: a real HTTP server that answers as SGLang, vLLM and others do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_afd.progress import Waiting
from sglang_afd.validate import url
from sglang_afd.validate.answers import Unanswered
from sglang_afd.validate.prompts import PromptSet
from sglang_afd.validate.settings import Settings
from sglang_afd.validate.sides import SideAnswers, SideFailed
from sglang_afd.validation.thresholds import THRESHOLDS

pytestmark = pytest.mark.unit

Change = Callable[[dict[str, Any]], Any]


def choice(body: dict[str, Any]) -> dict[str, Any]:
    """What both servers have in common: after token t comes t + 1."""
    tokens = [body["prompt"][-1] + i + 1 for i in range(body["max_tokens"])]
    logprobs = {
        "tokens": [f"word{token}" for token in tokens],
        "token_logprobs": [-0.5] * len(tokens),
        "top_logprobs": [{f"word{token}": -0.5, "other": -0.75} for token in tokens],
    }
    return {"token_ids": tokens, "finish_reason": "length", "logprobs": logprobs}


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Start a server whose completions have passed through `change`: its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(change: Change = lambda found: found, model: dict[str, Any] | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                known = self.path == "/v1/models"
                self.reply(200 if known else 404, {"data": [{"id": "m", **(model or {})}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                found = change(choice(body))
                if isinstance(found, int):
                    self.reply(found, {"error": "no"})
                else:
                    self.reply(200, {"choices": [found]})

            def reply(self, status: int, content: Any) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(address: str, tmp_path: Path) -> SideAnswers:
    settings = Settings(
        candidate_args=(), layout="", model=tmp_path, reference=address, reference_model=tmp_path,
        reference_args=(), reference_python="", prompts=PromptSet("x", [[3, 4], [9]], False),
        seed=1, new_tokens=3, record=(0,), thresholds=THRESHOLDS["float32"], dtype="auto",
        on_cpu=True, replayed=False, start_timeout=9, answer_timeout=9, work=tmp_path,
    )  # fmt: skip
    return url.answer(settings, Waiting(Console(file=StringIO())))


def test_tokens_logprobs_and_gaps(serve: Callable[..., str], tmp_path: Path) -> None:
    found = ask(serve() + "/v1/", tmp_path)
    first, second = found.results
    assert not isinstance(first, Unanswered) and not isinstance(second, Unanswered)
    assert (first.tokens, second.tokens) == ([5, 6, 7], [10, 11, 12])
    assert first.logprobs == [-0.5] * 3 and first.gaps == [0.25] * 3
    assert "localisation is unavailable" in found.no_layers
    assert found.identity.checkpoint == {}


def test_tokens_written_as_ids(serve: Callable[..., str], tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        found["logprobs"]["tokens"] = [f"token_id:{i}" for i in found.pop("token_ids")]
        return found

    [first, _] = ask(serve(change), tmp_path).results
    assert not isinstance(first, Unanswered) and first.tokens == [5, 6, 7]


def _without(*path: str) -> Change:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        place = found
        for name in path[:-1]:
            place = place[name]
        del place[path[-1]]
        return found

    return change


def _nan(found: dict[str, Any]) -> dict[str, Any]:
    found["logprobs"]["token_logprobs"][1] = None
    return found


def _short(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "token_ids": found["token_ids"][:2], "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("token_ids"), "no token ids"),
        (_without("logprobs"), "truncated: 0 of 3 tokens came .logprobs"),
        (_nan, "1 of 3 logprobs are not finite"),
        (_short, "truncated: 2 of 3 tokens came .stop"),
        (lambda found: 400, "refused with status 400"),
        (lambda found: 500, "refused with status 500"),
    ],
)
def test_what_is_no_answer_stays_visible(
    serve: Callable[..., str], change: Change, says: str, tmp_path: Path
) -> None:
    import re

    results = ask(serve(change), tmp_path).results
    assert len(results) == 2
    for found in results:
        assert isinstance(found, Unanswered) and re.search(says, str(found))


def test_without_alternatives_the_lead_is_unknown(
    serve: Callable[..., str], tmp_path: Path
) -> None:
    [first, _] = ask(serve(_without("logprobs", "top_logprobs")), tmp_path).results
    assert not isinstance(first, Unanswered) and first.gaps == []


def test_the_checkpoint_is_seen_where_it_is_on_this_machine(
    serve: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = ask(serve(model={"root": str(tmp_path)}), tmp_path)
    assert list(found.identity.checkpoint) == ["config.json"]


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(SideFailed, match="does not answer as an OpenAI-compatible server"):
        ask("http://127.0.0.1:9", tmp_path)
