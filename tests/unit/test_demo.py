"""What the demonstration says while it waits, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_afd import demo
from sglang_afd.observe.trace import Trace
from sglang_afd.running import Server, ServerFailed

pytestmark = pytest.mark.unit


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run the demo with a server that only ends as told: its status, and the files that it left."""
    logs = tmp_path / "logs"

    def demonstrate(end: BaseException | None = None) -> tuple[int, list[str]]:
        @contextmanager
        def serve(name: str, args: Any, *, logs: Path, **rest: Any) -> Iterator[Server]:
            (logs / "demo.log").write_text("[2026] loading\n")
            if end is not None:
                raise end
            yield Server(name, 1, 0.0, logs / "demo.log")

        logs.mkdir()
        monkeypatch.setattr(demo, "serve", serve)
        monkeypatch.setattr(demo, "_ask", lambda *args: None)
        monkeypatch.setattr(demo, "_show", lambda *args: None)
        monkeypatch.setattr(demo.trace, "begin", lambda *args: None)
        monkeypatch.setattr(demo.trace, "recorded", lambda url: Trace({}, []))
        monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(logs))
        return demo.main([]), sorted(file.name for file in logs.iterdir())

    return demonstrate


def test_a_trace_alone_is_left_after_success(run: Callable[..., tuple[int, list[str]]]) -> None:
    assert run() == (0, ["trace.json"])


def test_the_log_is_kept_after_a_failure(run: Callable[..., tuple[int, list[str]]]) -> None:
    assert run(ServerFailed("it ended")) == (1, ["demo.log"])


def test_ctrl_c_is_quiet(
    run: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(KeyboardInterrupt()) == (130, ["demo.log"])
    assert "Traceback" not in "".join(capsys.readouterr())


def test_what_a_draft_gained_is_told_without_the_prefills_token() -> None:
    told = {"spec_verify_ct": 40, "spec_correct_drafts_histogram": [5, 0, 6, 29]}
    text = demo._acceptance(121, told)
    assert text.startswith("Acceptance length 3.00 tokens a verify step: 120 in 40 steps;")
    assert text.endswith("(steps x tokens): 5 x 0, 6 x 2, 29 x 3\n")
