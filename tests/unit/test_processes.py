"""The wait for a command's ranks ends at the time that was set when the command started."""

from __future__ import annotations

import time
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_afd.config import START_BY_ENV, AfdConfig
from sglang_afd.upstream import processes
from sglang_afd.upstream.handshake import StartError
from sglang_afd.upstream.hooks import Hook

pytestmark = pytest.mark.unit

CONFIG = AfdConfig(attention_ranks=1, ffn_ranks=1, startup_timeout=500)


def hook(name: str) -> Hook:
    [found] = [h for h in processes.hooks(CONFIG) if h.target.endswith("." + name)]
    return found


def launch(monkeypatch: pytest.MonkeyPatch, readers: dict[int, Any]) -> SimpleNamespace:
    """Launch ranks that report through `readers`."""
    controller = SimpleNamespace(_record_scheduler_init_infos=None, infos=None)
    controller._record_scheduler_init_infos = lambda infos: setattr(controller, "infos", infos)
    monkeypatch.setattr(processes, "_hand_out_ranks", lambda *args: readers)
    hook("launch_tensor_parallel_group").fn(controller, None, None, 0, None)
    return controller


def test_time_that_imports_took_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command started long ago: its ranks are late although nobody has waited yet."""
    monkeypatch.setenv(START_BY_ENV, str(time.monotonic() + 0.2))
    reader, writer = Pipe(duplex=False)
    began = time.monotonic()
    with pytest.raises(StartError) as late:
        launch(monkeypatch, {1: reader})
    assert time.monotonic() - began < 20
    assert "not ready within 500 s (--afd-startup-timeout): FFN rank 0 (world rank 1)" in str(
        late.value
    )
    writer.close()


def test_ranks_that_report_in_time_are_recorded_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_BY_ENV, str(time.monotonic() + 60))
    pipes = [Pipe(duplex=False) for _ in range(2)]
    for rank, (_, writer) in enumerate(pipes):
        writer.send({"rank": rank})
    controller = launch(monkeypatch, {1: pipes[1][0], 0: pipes[0][0]})
    assert controller.infos == [{"rank": 0}, {"rank": 1}]


def test_a_rank_that_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_BY_ENV, str(time.monotonic() + 60))
    reader, writer = Pipe(duplex=False)
    writer.close()
    with pytest.raises(StartError, match=r"^attention rank 0 .* ended while starting"):
        launch(monkeypatch, {0: reader})


def test_what_ends_is_called_by_its_name() -> None:
    """The processes as SGLang's watchdog gets them: controller, ranks in order, detokenizer."""
    named = ["the DP controller", "attention rank 0 (world rank 0)", "FFN rank 0 (world rank 1)"]
    watch = hook("__init__").fn
    theirs = ["scheduler_0", "scheduler_1", "scheduler_2", "detokenizer"]
    [_, _, names], _ = watch("self", [None] * 4, process_names=theirs)
    assert names == [*named, "detokenizer"]
    [_, _, names], _ = watch("self", [None] * 3)
    assert names == named
