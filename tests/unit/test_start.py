"""What a command hands to the processes it starts, through the environment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from sglang_afd import embedded, start
from sglang_afd.config import ENV, START_BY_ENV, AfdConfig
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
