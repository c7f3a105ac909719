"""What the demonstration says while it waits, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_afd import demo
from sglang_afd.running import Server, ServerFailed

pytestmark = pytest.mark.unit


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, bool]]:
    """Run the demo with a server that only ends as told: its status, and whether logs are left."""
    logs = tmp_path / "logs"

    def demonstrate(end: BaseException | None = None) -> tuple[int, bool]:
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
        monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(logs))
        return demo.main([]), logs.exists()

    return demonstrate


def test_nothing_is_left_after_success(run: Callable[..., tuple[int, bool]]) -> None:
    assert run() == (0, False)


def test_the_log_is_kept_after_a_failure(run: Callable[..., tuple[int, bool]]) -> None:
    assert run(ServerFailed("it ended")) == (1, True)


def test_ctrl_c_is_quiet(
    run: Callable[..., tuple[int, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(KeyboardInterrupt()) == (130, True)
    assert "Traceback" not in "".join(capsys.readouterr())
