"""A Ray cluster's nodes for the roles, and what the command line says about them."""

from __future__ import annotations

import sys

import pytest

from sglang_afd import launch_server, on_ray
from sglang_afd.config import ConfigError
from sglang_afd.on_ray import Node, OnRay, place, take
from sglang_afd.topology import Role

pytestmark = pytest.mark.unit

NODES = [
    Node("aaaaaa11", "10.0.0.1", 8),
    Node("bbbbbb22", "10.0.0.2", 8),
    Node("cccccc33", "10.0.0.3", 4),
]
RANKS = ["--afd-attention-ranks", "1", "--afd-ffn-ranks", "1"]
ANYWHERE = OnRay("auto", None, None)


def placed(wanted: OnRay, attention: int, ffn: int) -> tuple[str, str]:
    found = place(NODES, wanted, {Role.ATTENTION: attention, Role.FFN: ffn})
    return found[Role.ATTENTION].id[0], found[Role.FFN].id[0]


@pytest.mark.parametrize(
    ("attention", "ffn", "where"),
    [
        (8, 4, ("a", "c")),
        (4, 2, ("a", "c")),
        (8, 8, ("a", "b")),  # the last node that has them
        (0, 0, ("a", "c")),
    ],
)
def test_ffn_ranks_take_the_last_node(attention: int, ffn: int, where: tuple[str, str]) -> None:
    assert placed(ANYWHERE, attention, ffn) == where


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        (OnRay("auto", "10.0.0.2", None), ("b", "c")),
        (OnRay("auto", None, "10.0.0.1"), ("a", "a")),
        (OnRay("auto", "cccccc3", "bbbbbb"), ("c", "b")),
        (OnRay("auto", "10.0.0.1", "10.0.0.1"), ("a", "a")),
    ],
)
def test_named_nodes_are_taken(wanted: OnRay, where: tuple[str, str]) -> None:
    assert placed(wanted, 4, 4) == where


@pytest.mark.parametrize(
    ("wanted", "attention", "ffn", "said"),
    [
        (ANYWHERE, 9, 1, "attention ranks need 9 GPUs on one node"),
        (ANYWHERE, 1, 9, "ffn ranks need 9 GPUs on one node"),
        (OnRay("auto", "10.0.0.1", "10.0.0.1"), 5, 4, "free are 10.0.0.1: 4"),
        (OnRay("auto", None, "10.0.0.9"), 1, 1, "--afd-ray-ffn-node 10.0.0.9"),
        (OnRay("auto", "aaaa", None), 1, 1, "no such node"),  # an id's first four are too few
    ],
)
def test_no_room(wanted: OnRay, attention: int, ffn: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        placed(wanted, attention, ffn)


def test_what_ray_is_asked_for_is_taken_off_the_command_line() -> None:
    assert take(RANKS) == (None, RANKS)
    assert take(["--afd-ray", *RANKS]) == (ANYWHERE, RANKS)
    wanted, rest = take([*RANKS, "--afd-ray", "h:1", "--afd-ray-ffn-node", "n", "--port", "1"])
    assert wanted == OnRay("h:1", None, "n") and rest == [*RANKS, "--port", "1"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--afd-ray", *RANKS, "--afd-ray-ffn-node"], "--afd-ray-ffn-node: expected one argument"),
        (["--afd-ray", *RANKS, "--afd-ray-ffn-node=--"], "--afd-ray-ffn-node has no value"),
        (["--afd-ray", *RANKS, "--afd-restart", "2"], "leave one of them out"),
        (["--afd-ray-ffn-node", "n"], "--afd-ray-ffn-node needs --afd-ray"),
        (["--afd-ray"], "needs --afd-attention-ranks"),
        (["--afd-ray", "--afd-attention-ranks", "1"], "give both"),
        (["--afd-ray", *RANKS, "--afd-role", "ffn"], "--afd-role is set by --afd-ray"),
    ],
)
def test_what_cannot_be_right_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch_server.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'sglang_afd\[ray\]'"):
        on_ray.run(ANYWHERE, RANKS, program="launch_server")
