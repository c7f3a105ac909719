"""What cannot be right ends soon, with one readable error, exit code != 0, and no process left."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from sglang_afd.running import free_port
from sglang_afd.topology import Topology
from tests.support.client import request_body
from tests.support.processes import scheduler, wait_until
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = pytest.mark.integration

Start = Callable[..., World]
A2F1 = ("--afd-attention-ranks", "2", "--afd-ffn-ranks", "1")
REFUSED_WITHIN = 20.0  # seconds: no rank is started for what the command line tells
CRASH_WITHIN = 30.0  # seconds from a rank's death to the last process's


def refused(world: World, *, within: float = REFUSED_WITHIN) -> str:
    """The one error with which the command ended, within bounds and without a traceback."""
    code = world.wait_ended(within)
    assert code == 2, f"exit code {code}:\n{world.tail()}"
    assert "Traceback" not in world.log, world.tail()
    errors = [part for part in world.log.split("launch_server: error: ")[1:]]
    assert len(errors) == 1, world.tail()
    return errors[0]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--afd-attention-ranks", "2", "--afd-ffn-ranks", "0"], ["--afd-ffn-ranks", "at least 1"]),
        (["--afd-attention-ranks", "2"], ["--afd-ffn-ranks"]),
        (["--afd-attention-ranks", "1", "--afd-ffn-ranks", "5"], ["12 experts", "5 FFN ranks"]),
        ([*A2F1, "--afd-attention-tp", "3"], ["4 attention heads", "--afd-attention-tp 3"]),
        ([*A2F1, "--afd-transport", "smoke"], ["--afd-transport smoke", "gloo"]),
        ([*A2F1, "--afd-transport", "deepep"], ["deepep", "--afd-transport gloo"]),
        ([*A2F1, "--afd-max-tokens-per-rank", "0"], ["--afd-max-tokens-per-rank"]),
        ([*A2F1, "--afd-ratio", "2"], ["--afd-ratio", "--help"]),
        ([*A2F1, "--tp-size", "4"], ["--tp-size", "--afd-"]),
        ([*A2F1, "--enable-lora"], ["--enable-lora", "LoRA"]),
        ([*A2F1, "--model-path", "/nowhere"], ["/nowhere"]),
        ([*A2F1, "--afd-role", "ffn"], ["--nnodes 2", "--dist-init-addr"]),
    ],
    ids=[
        "no-ffn-rank",
        "one-count",
        "experts-not-divisible",
        "heads-not-divisible",
        "unknown-transport",
        "deepep-on-a-cpu",
        "no-row",
        "unknown-flag",
        "owned-flag",
        "refused-feature",
        "no-checkpoint",
        "half-a-command",
    ],
)
def test_bad_command_line(start: Start, flags: list[str], named: list[str]) -> None:
    error = refused(start(flags))
    assert all(name in error for name in named), error


def test_unsupported_model(start: Start, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(start([*A2F1, "--model-path", str(tmp_path)]))
    assert "LlamaForCausalLM" in error and "Qwen3MoeForCausalLM" in error, error


def test_port_taken(start: Start) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        error = refused(start(A2F1, port=port))
    assert str(port) in error and "--port" in error, error


def in_mid_request(world: World) -> Callable[[], str]:
    """Send a long request, wait until it runs; the result says how it ended, within 60 s."""
    ended: list[str] = []

    def run() -> None:
        try:
            body = request_body(prompts([20])[0], 3000)
            ended.append(str(world.post("/generate", body, timeout=90).status_code))
        except requests.RequestException as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    loads = lambda: world.get("/v1/loads").json()["loads"]  # noqa: E731
    assert wait_until(lambda: any(load["num_running_reqs"] for load in loads()), 20)

    def result() -> str:
        thread.join(60)
        assert ended, "the client still waits for an answer"
        return ended[0]

    return result


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        (0, "attention rank 0 (world rank 0)"),
        pytest.param(1, "attention rank 1 (world rank 1)", marks=pytest.mark.full),
        (2, "FFN rank 0 (world rank 2)"),
    ],
)
def test_killed_rank(start: Start, rank: int, name: str) -> None:
    """kill -9 of any rank in mid-request ends the deployment; its log names the rank."""
    world = start(A2F1).wait_healthy()
    answered = in_mid_request(world)
    before = len(world.log)
    scheduler(world.pid, rank).kill()
    assert world.wait_ended(CRASH_WITHIN) != 0
    assert f"{name} was ended by SIGKILL" in world.log[before:], world.tail()
    assert answered() != "200"


NO_OVERLAP = ("--disable-overlap-schedule",)


@pytest.mark.parametrize(
    ("rank", "busy", "flags"),
    [
        (0, False, ()),
        (2, True, ()),
        (2, False, NO_OVERLAP),
        pytest.param(0, True, (), marks=pytest.mark.full),
        pytest.param(2, False, (), marks=pytest.mark.full),
        pytest.param(1, True, NO_OVERLAP, marks=pytest.mark.full),
    ],
)
def test_hanging_rank(start: Start, rank: int, busy: bool, flags: tuple[str, ...]) -> None:
    """A rank that hangs, also while idle, is noticed after the exchange timeout, by its name."""
    world = start([*A2F1, "--afd-exchange-timeout", "5", *flags]).wait_healthy()
    answered = in_mid_request(world) if busy else None
    before = len(world.log)
    scheduler(world.pid, rank).send_signal(signal.SIGSTOP)
    assert world.wait_ended(5 + CRASH_WITHIN) != 0
    error = world.log[before:]
    name = re.escape(Topology(2, 1).name_of(rank))
    failed = r"rank \d \(world rank \d\) failed .*" + name + " within"
    lost = r"lost a peer between steps \(not there within --afd-exchange-timeout, 5 s: " + name
    assert re.search(f"{failed}|{lost}\\)", error), world.tail()
    assert answered is None or answered() != "200"
