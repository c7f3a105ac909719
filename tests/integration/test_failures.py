"""What cannot be right ends soon, with one readable error, exit code != 0, and no process left.

The table of docs/reliability.md names every test of this file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from sglang_afd.running import free_port
from sglang_afd.topology import Topology
from sglang_afd.upstream import health
from tests.support import faults
from tests.support.client import request_body
from tests.support.layouts import SMALL, on
from tests.support.networks import two_hosts
from tests.support.processes import scheduler, title, wait_until
from tests.support.reference import Expect, assert_equal, check
from tests.support.two_commands import command
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

Start = Callable[..., World]
A1F1 = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", "--dtype", "float32")
A2F1 = ("--afd-attention-ranks", "2", "--afd-ffn-ranks", "1")
REFUSED_WITHIN = 20.0  # seconds: no rank is started for what the command line tells
GONE_WITHIN = 15.0  # seconds from a stop or a rank's death until no process and no port is left


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


def test_corrupt_checkpoint(
    start: Start, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """A file that was cut short is found before a rank starts."""
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints("seeded"), broken)
    file = sorted(broken.glob("*.safetensors"))[1]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)
    error = refused(start([*A2F1, "--model-path", str(broken)]))
    assert file.name in error and "download it again" in error, error


class Cut(NamedTuple):
    """Two requests that run, one of them a stream."""

    plain: Future[requests.Response]
    stream: Future[list[dict[str, Any]]]

    def told(self) -> None:
        """Both have ended with an error of the server's that says what to do."""
        answer, events = self.plain.result(30), self.stream.result(30)
        assert answer.status_code == 503, answer.text
        assert "send the request again" in answer.text
        last = events[-1]["meta_info"]
        assert last["finish_reason"]["type"] == "abort", last
        assert last["finish_reason"]["status_code"] == 503
        assert last["completion_tokens"] < MOST


MOST = 3000  # tokens: more than are made before the end


def in_mid_request(world: World) -> Cut:
    """Send long requests, and wait until they run."""
    first, second = prompts([20, 30])
    pool = ThreadPoolExecutor(2)
    cut = Cut(
        pool.submit(world.post, "/generate", request_body(first, MOST), timeout=90),
        pool.submit(lambda: list(world.stream(second, MOST))),
    )
    pool.shutdown(wait=False)

    def running() -> int:
        loads = world.get("/v1/loads").json()["loads"]
        return sum(load["num_running_reqs"] for load in loads)

    assert wait_until(lambda: running() == 2, 20)
    return cut


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
    cut = in_mid_request(world)
    before = len(world.log)
    scheduler(world.pid, rank).kill()
    assert world.wait_gone(GONE_WITHIN) == 1
    assert f"{name} was ended by SIGKILL" in world.log[before:], world.tail()
    cut.told()


def test_killed_while_idle_and_restarted(start: Start, expect: Expect) -> None:
    """The port serves again at once, and the answers are right."""
    world = start(A1F1).wait_healthy()
    scheduler(world.pid, 1).kill()
    assert world.wait_gone(GONE_WITHIN) == 1
    assert world.last_line.startswith("launch_server: error: FFN rank 0"), world.tail()
    again = start(A1F1, port=world.port).wait_healthy()
    check(again, expect, prompts([9]), 8)
    os.kill(again.pid, signal.SIGTERM)
    assert again.wait_gone(GONE_WITHIN) == 0


@pytest.mark.full
@pytest.mark.parametrize("victim", ["command", "detokenizer", "controller"])
def test_killed_beside_the_ranks(start: Start, victim: str) -> None:
    """The processes that are no ranks: nothing survives them either."""
    world = start(A1F1).wait_healthy()
    titles = {"detokenizer": "sglang::detokenizer", "controller": "sglang::data_parallel"}
    [process] = [
        process
        for process in world.processes()
        if (process.pid == world.pid if victim == "command" else titles[victim] in title(process))
    ]
    if victim == "command":
        world.shared.clear()  # nobody is there to remove it
    process.kill()
    assert world.wait_gone(GONE_WITHIN) != 0


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
    cut = in_mid_request(world) if busy else None
    before = len(world.log)
    scheduler(world.pid, rank).send_signal(signal.SIGSTOP)
    assert world.wait_gone(5 + GONE_WITHIN) == 1
    error = world.log[before:]
    name = re.escape(Topology(2, 1).name_of(rank))
    failed = r"rank \d \(world rank \d\) failed .*" + name + " within"
    lost = r"lost a peer between steps \(not there within --afd-exchange-timeout, 5 s: " + name
    assert re.search(f"{failed}|{lost}\\)", error), world.tail()
    if cut is not None:
        cut.told()


@contextmanager
def stopped(world: World, rank: int) -> Iterator[None]:
    """A rank hangs in the block."""
    process = scheduler(world.pid, rank)
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


RANKS = [2, pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full)]


@on(SMALL)
@pytest.mark.parametrize("rank", RANKS)
def test_health_while_a_rank_hangs(world: World, expect: Expect, rank: int) -> None:
    """503 within 10 s, long before the exchange timeout; 200 again once the rank goes on."""
    with stopped(world, rank), ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        for answer in pool.map(world.get, ("/health", "/health_generate")):
            assert answer.status_code == 503
        assert time.monotonic() - began < health.FAILED_AFTER
    assert wait_until(lambda: world.get("/health").status_code == 200, 20)
    check(world, expect, prompts([20, 9], seed=71), 8)


@on(SMALL)
@pytest.mark.parametrize("rank", RANKS)
def test_slow_rank(world: World, expect: Expect, rank: int) -> None:
    """A rank that stands still for a second now and then: answers come later, and are right."""
    asked = prompts([20, 70, 9], seed=72)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(send, world, asked, 64)
        for _ in range(3):
            with stopped(world, rank):
                time.sleep(1)
            time.sleep(0.1)
        assert_equal(answers.result(60), expect(asked, 64))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (faults.no_memory_once, ["FFN rank 0", "can't allocate memory", "--mem-fraction-static"]),
        (faults.nan_once, ["attention rank 0", "NaN detected", "sglang_afd.validate"]),
    ],
    ids=["no memory", "NaN from an expert"],
)
def test_rank_that_cannot_go_on(start: Start, fault: Callable[[], None], said: list[str]) -> None:
    """No wrong token is served: the request gets an error, and the last line says what to do."""
    world = start(A1F1, env={faults.FAULT: fault.__name__}).wait_healthy()
    answer = world.post("/generate", request_body(prompts([20])[0], 80))
    assert answer.status_code == 503, answer.text
    assert world.wait_gone(GONE_WITHIN) == 1
    assert world.last_line.startswith("launch_server: error: "), world.tail()
    assert all(part in world.last_line for part in said), world.tail()


@pytest.mark.full
def test_log_on_a_full_disk(start: Start, expect: Expect) -> None:
    """A rank that can write no line of its log goes on serving."""
    world = start(A1F1, env={faults.FAULT: faults.log_on_a_full_disk.__name__}).wait_healthy()
    check(world, expect, prompts([20, 9]), 60)
    world.stop()


def test_lost_network(start: Start) -> None:
    """Two hosts, a command on each, and the cable between them pulled in mid-request."""
    with two_hosts() as (here, there):
        port, timeout = free_port(), ("--afd-exchange-timeout", "5")
        front, back = (
            start(command(role, port, 1, 1, *timeout, address=here.address), env=host.environment)
            for role, host in (("attention", here), ("ffn", there))
        )
        with here.inside():
            front.wait_healthy()
            cut = in_mid_request(front)
        here.cut()
        for world in (front, back):
            assert world.wait_ended(5 + GONE_WITHIN) == 1
            assert world.last_line.startswith("launch_server: error: "), world.tail()
        assert "FFN rank 0 (world rank 1)" in front.last_line, front.tail()
        assert "attention rank 0 (world rank 0)" in back.last_line, back.tail()
        cut.told()


@pytest.mark.full
def test_five_cycles_leave_nothing(start: Start, tmp_path: Path) -> None:
    """No process, port, shared memory or temporary file is left of starts and stops."""
    port = free_port()
    for _ in range(5):
        world = start(A1F1, port=port, env={"TMPDIR": str(tmp_path)}).wait_healthy()
        world.generate(prompts([9])[0], 4)
        assert world.shared and any(tmp_path.iterdir()), "there is something to leave"
        os.kill(world.pid, signal.SIGTERM)
        assert world.wait_gone(GONE_WITHIN) == 0
        assert not any(tmp_path.iterdir())
