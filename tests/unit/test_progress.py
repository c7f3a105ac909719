"""Lines that say how far a command is."""

from __future__ import annotations

import pytest

from sglang_afd import progress

pytestmark = pytest.mark.unit


def test_lines_come_now_and_then_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    said: list[str] = []
    update = progress.now_and_then(said.append)
    for second in range(60):
        now[0] = 100.0 + second
        update(f"{second} s")
    assert said == ["10 s", "20 s", "30 s", "40 s", "50 s"]
