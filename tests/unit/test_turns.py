"""Whose lanes take turns."""

from __future__ import annotations

import pytest

from sglang_afd.config import ConfigError
from sglang_afd.dispatch.turns import ENV, NoTurns, turns_of
from sglang_afd.topology import Role


@pytest.mark.parametrize(
    ("lanes", "wanted", "role"),
    [
        (1, "all", Role.FFN),
        (2, "none", Role.FFN),
        (2, "ffn", Role.ATTENTION),
        (3, "attention", Role.FFN),
    ],
)
def test_lanes_without_turns(
    lanes: int, wanted: str, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, wanted)
    assert isinstance(turns_of(role, lanes, "cpu", 1.0), NoTurns)


@pytest.mark.parametrize(
    ("wanted", "role"), [(None, Role.ATTENTION), ("all", Role.FFN), ("ffn", Role.FFN)]
)
def test_lanes_in_turns(wanted: str | None, role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[float] = []

    class Recorded:
        def __init__(self, device: object, seconds: float) -> None:
            loaded.append(seconds)

        def load(self) -> None:
            loaded.append(0.0)

    monkeypatch.delenv(ENV, raising=False)
    if wanted is not None:
        monkeypatch.setenv(ENV, wanted)
    monkeypatch.setattr("sglang_afd.dispatch.turns.DeviceTurns", Recorded)
    assert isinstance(turns_of(role, 2, "cpu", 7.0), Recorded)
    assert loaded == [7.0, 0.0]


@pytest.mark.parametrize("wanted", ["", "1", "both"])
def test_a_misspelt_wish_is_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, wanted)
    with pytest.raises(ConfigError, match=f"{ENV} is '{wanted}'; use one of all, none"):
        turns_of(Role.FFN, 2, "cpu", 1.0)
