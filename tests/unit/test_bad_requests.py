"""When the HTTP fuzz calls a request lost: by what the server does, not by how long it takes."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.bad_requests import Request

pytestmark = pytest.mark.unit

ASKED = Request("GET", "/", (), b"")
SLOW = 1.2  # seconds that an answer takes


@pytest.fixture
def slow_server() -> Iterator[str]:
    """Answers 201 after `SLOW` seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(SLOW)
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_slow_answer_counts_while_there_is_progress(slow_server: str) -> None:
    steps = itertools.count()
    assert ASKED.send(slow_server, SLOW / 3, lambda: next(steps)) == 201


def test_a_standstill_is_no_answer(slow_server: str) -> None:
    assert ASKED.send(slow_server, SLOW / 3, lambda: 0) is None


def test_a_connection_closed_without_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        began = time.monotonic()
        assert ASKED.send(f"http://127.0.0.1:{server.getsockname()[1]}", 20.0, lambda: 0) is None
        assert time.monotonic() - began < 10
