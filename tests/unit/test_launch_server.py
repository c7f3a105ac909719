"""What the command looks at before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sglang_afd import command_line, launch_server, on_ray, start

pytestmark = pytest.mark.unit

RANKS = "afd-attention-ranks: 1\nafd-ffn-ranks: 1\n"


class Reached(Exception):
    """The part that would go on got these arguments."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The --config files that are read."""
    read, plain = list[str](), command_line._read_yaml

    def note(file: str) -> dict[str, Any]:
        read.append(file)
        return plain(file)

    monkeypatch.setattr(command_line, "_read_yaml", note)
    return read


@pytest.mark.parametrize(
    ("more", "part"),
    [("", "here"), ("afd-restart: 2\n", "front"), ("afd-ray: auto\n", "ray")],
)
def test_a_config_file_is_read_once(
    reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: str, part: str
) -> None:
    """Whichever part of ours goes on: it may change in between, or be a pipe."""
    from sglang_afd.front import command

    def here(argv: Sequence[str], *, program: str) -> NoReturn:
        start._read(argv, program)
        raise Reached("here", *argv)

    def front(settings: Any, *, program: str) -> NoReturn:
        raise Reached("front", *settings.world)

    def ray(wanted: Any, rest: Sequence[str], *, program: str) -> NoReturn:
        raise Reached("ray", *rest)

    monkeypatch.setattr(start, "prepare", here)
    monkeypatch.setattr(command, "run", front)
    monkeypatch.setattr(on_ray, "run", ray)
    file = tmp_path / "config.yaml"
    file.write_text(RANKS + more)
    with pytest.raises(Reached) as reached:
        launch_server.main(["--config", str(file), "--port", "5"])
    assert reached.value.args[0] == part
    assert reads == [str(file)]
    assert reached.value.args[-2:] == ("--port", "5") and "--config" not in reached.value.args


def test_plain_sglang_reads_its_file_itself(
    reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 5\n")

    def here(argv: Sequence[str], *, program: str) -> NoReturn:
        raise Reached(*argv)

    monkeypatch.setattr(start, "prepare", here)
    with pytest.raises(Reached) as reached:
        launch_server.main(["--config", str(file)])
    assert reached.value.args == ("--config", str(file))
