"""What a command hands to the processes it starts, through the environment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from sglang_afd import embedded, start
from sglang_afd.command_line import values
from sglang_afd.config import ENV, START_BY_ENV, AfdConfig
from sglang_afd.gate import Finding
from sglang_afd.machine import Gpu, Machine
from sglang_afd.platform.defaults import REQUIRED_ENVIRONMENT, cpu_environment
from sglang_afd.running import free_port

pytestmark = pytest.mark.unit

A1F1 = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")
CPU = ("--device", "cpu", "--model-path", str(embedded.path()))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """An environment without AFD, as it was again after the test."""
    before = dict(os.environ)
    for name in (ENV, START_BY_ENV, *cpu_environment(1)):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


def resolve(*flags: str) -> start.Command:
    return start.resolve([*CPU, *flags, "--port", str(free_port())], program="test")


def test_the_start_up_time_runs_from_the_command_on() -> None:
    before = time.monotonic()
    resolve(*A1F1, "--afd-startup-timeout", "50")
    config = AfdConfig.from_environment()
    assert config is not None
    assert before + 50 <= config.start_by() <= time.monotonic() + 50
    time.sleep(0.05)
    assert config.start_by() <= time.monotonic() + 49.96, "it began anew in a later process"


def test_without_a_stamp_the_start_up_time_runs_from_now_on() -> None:
    config = AfdConfig(attention_ranks=1, ffn_ranks=1, startup_timeout=50)
    assert config.start_by() == pytest.approx(time.monotonic() + 50, abs=5)


def test_a_later_command_of_the_process_has_its_own_start_up_time() -> None:
    os.environ[START_BY_ENV] = "0.0"
    resolve(*A1F1)
    assert float(os.environ[START_BY_ENV]) > time.monotonic()


def test_plain_sglang_gets_neither_deployment_nor_bound() -> None:
    resolve()
    assert ENV not in os.environ and START_BY_ENV not in os.environ


@pytest.mark.parametrize("left", ["garbage", '{"attention_ranks":1,"ffn_ranks":1}'])
def test_plain_sglang_is_not_part_of_a_deployment_that_was_left_in_the_environment(
    left: str,
) -> None:
    os.environ.update({ENV: left, START_BY_ENV: "0.0"})
    resolve()
    assert ENV not in os.environ and START_BY_ENV not in os.environ


@pytest.mark.parametrize("flags", [A1F1, ()], ids=["afd", "plain"])
def test_values_that_the_cpu_platform_needs_replace_the_users(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", CUDA_VISIBLE_DEVICES="0", SGLANG_PLATFORM="x")
    resolve(*flags)
    assert {name: os.environ[name] for name in REQUIRED_ENVIRONMENT} == REQUIRED_ENVIRONMENT
    line = capsys.readouterr().out.splitlines()[-1]
    for said in ("SGLANG_USE_CPU_ENGINE=0 in place of 1", "CUDA_VISIBLE_DEVICES= in place of 0"):
        assert said in line


def test_nothing_is_said_where_nothing_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(REQUIRED_ENVIRONMENT, OMP_NUM_THREADS="7", TORCH_COMPILE_DISABLE="0")
    resolve(*A1F1)
    assert "in place of" not in capsys.readouterr().out
    assert os.environ["OMP_NUM_THREADS"] == "7", "the user's to choose"
    assert os.environ["TORCH_COMPILE_DISABLE"] == "0", "the user's to choose"


@pytest.mark.parametrize("flags", [A1F1, ()], ids=["afd", "plain"])
def test_a_broken_thread_setting_ends_the_command_by_its_name(flags: tuple[str, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "abc"
    with pytest.raises(start.Refused, match="OMP_NUM_THREADS is 'abc', which is no number"):
        resolve(*flags)


def test_a_command_reaches_itself_without_a_proxy() -> None:
    for name in ("no_proxy", "NO_PROXY", *start._PROXIES):
        os.environ.pop(name, None)
    resolve(*A1F1)
    assert "no_proxy" not in os.environ, "nothing to keep off"
    os.environ.update(HTTP_PROXY="http://proxy.example:9", no_proxy="example.org, localhost")
    resolve(*A1F1, "--host", "0.0.0.0")
    assert os.environ["no_proxy"] == "example.org,localhost,127.0.0.1,0.0.0.0"
    assert os.environ["NO_PROXY"] == "127.0.0.1,localhost,0.0.0.0"


HERE, ELSEWHERE = "127.0.0.1:5000", "192.0.2.7:5000"  # the latter is an address for examples


def first_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, *flags: str) -> list[str | None]:
    """The --base-gpu-id of a command on a machine with so many GPUs."""
    machine = Machine((Gpu("H200", (9, 0)),) * gpus, frozenset({"deep_ep", "deep_gemm"}))
    monkeypatch.setattr(start, "this_machine", lambda: machine)
    facts = start.read_facts(["--model-path", str(embedded.path()), *flags], program="test")
    assert facts is not None
    return values(facts.args, "--base-gpu-id")


def two_commands(role: str, address: str, *flags: str) -> list[str]:
    """A role's command at 2A1F, attention TP 2: 4 attention and 2 FFN ranks."""
    return [
        *("--afd-attention-ranks", "2", "--afd-ffn-ranks", "1", "--afd-attention-tp", "2"),
        *("--afd-role", role, "--nnodes", "2", "--node-rank", "01"[role == "ffn"]),
        *("--dist-init-addr", address, *flags),
    ]


@pytest.mark.parametrize(
    ("gpus", "role", "address", "flags", "expected"),
    [
        (8, "ffn", HERE, (), ["4"]),
        (6, "ffn", HERE, (), ["4"]),
        (5, "ffn", HERE, (), []),  # too few for all: the roles may share
        (1, "ffn", HERE, (), []),
        (8, "ffn", ELSEWHERE, (), []),  # the attention command's GPUs are another machine's
        (8, "attention", HERE, (), []),
        (8, "ffn", HERE, ("--base-gpu-id", "0"), ["0"]),
        (8, "ffn", HERE, ("--base-gpu-id=6",), ["6"]),
        (11, "ffn", HERE, ("--gpu-id-step", "2"), ["8"]),
        (10, "ffn", HERE, ("--gpu-id-step", "2"), []),
        (8, "ffn", HERE, ("--device", "cpu"), []),
        (8, "ffn", "nonsense", (), []),
    ],
)
def test_an_ffn_command_takes_the_gpus_after_those_of_attention(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    role: str,
    address: str,
    flags: tuple[str, ...],
    expected: list[str],
) -> None:
    assert first_gpus(monkeypatch, gpus, *two_commands(role, address, *flags)) == expected


def test_one_command_starts_at_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_gpus(monkeypatch, 8, *A1F1) == []


def test_a_predicted_loss_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = Finding("performance", True, "1A1F is slow", "use EP2")
    monkeypatch.setattr(start, "findings", lambda facts: [advice])
    assert resolve(*A1F1).config is not None
    assert capsys.readouterr().err == "test: performance: 1A1F is slow; use EP2\n"
