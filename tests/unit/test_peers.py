"""A wait for peers that fails between steps says whom it lacked; other errors stay themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.runtime_context as runtime_context
import torch
import torch.distributed as dist

from sglang_afd import context as context_module
from sglang_afd import rollcall
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.dispatch.transport import ExchangeError
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.upstream import peers

pytestmark = pytest.mark.unit

CONFIG = AfdConfig(attention_ranks=2, ffn_ranks=1, exchange_timeout=5)
CLOSED = "[third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer"
TIMED_OUT = "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:83] Timed out waiting 5000ms"
SYNC, BROADCAST = "exchange_sync_rows", "_broadcast_reqs_across_ranks"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """The world's store; this process is attention rank 1 of three ranks."""
    facts = MoeFacts((0,), num_experts=4, top_k=2, hidden_size=4, intermediate_size=6)
    rank = RankContext(CONFIG, 1, FAMILIES["Qwen3MoeForCausalLM"], facts, {})
    store = dist.HashStore()
    monkeypatch.setattr(context_module, "_current", rank)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(rollcall.absent, "__defaults__", (0.2,))
    return store


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the failing wait seem to have taken some seconds."""
    now = iter([0.0, 0.0])

    def seconds(duration: float) -> None:
        nonlocal now
        now = iter([100.0, 100.0 + duration])

    clock = type("Clock", (), {"monotonic": staticmethod(lambda: next(now))})
    monkeypatch.setattr(peers, "time", clock)
    return seconds


def failing(name: str, error: Exception) -> Any:
    """Run the hook of `name` around a function that raises `error`."""
    [hook] = [h for h in peers.hooks(CONFIG) if h.target.endswith("." + name)]

    def original(argument: str) -> None:
        assert argument == "given"
        raise error

    return hook.fn(original, "given")


@pytest.mark.parametrize("name", [SYNC, BROADCAST])
def test_a_wait_that_ran_out_names_the_rank_that_did_not_come(
    store: dist.HashStore, waited: Callable[[float], None], name: str
) -> None:
    rollcall.answer(store, 0)
    waited(5.0)
    with pytest.raises(ExchangeError) as lost:
        failing(name, RuntimeError(TIMED_OUT))
    assert re.match(
        r"attention rank 1 \(world rank 1\) lost a peer between steps \(not there within "
        r"--afd-exchange-timeout, 5 s: FFN rank 0 \(world rank 2\)\): .*Timed out",
        str(lost.value),
    )


def test_ranks_that_all_wait_are_told_apart_from_one_that_hangs(
    store: dist.HashStore, waited: Callable[[float], None]
) -> None:
    for rank in (0, 2):
        rollcall.answer(store, rank)
    waited(5.0)
    with pytest.raises(ExchangeError, match="none, all wait for each other"):
        failing(SYNC, RuntimeError(TIMED_OUT))


@pytest.mark.parametrize("name", [SYNC, BROADCAST])
def test_a_connection_that_closed_names_nobody_but_answers(
    store: dist.HashStore, waited: Callable[[float], None], name: str
) -> None:
    """The rank that died is in its command's log; the ranks not heard of may be well."""
    waited(0.5)
    with pytest.raises(ExchangeError, match=r"^attention rank 1 .* lost a peer between steps: .*c"):
        failing(name, RuntimeError(CLOSED))
    assert rollcall.absent(store, 0, range(2), 0.2) == []


@pytest.mark.parametrize("name", [SYNC, BROADCAST])
@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError(CLOSED)])
def test_other_errors_stay_themselves(
    store: dist.HashStore, waited: Callable[[float], None], name: str, error: Exception
) -> None:
    waited(5.0)
    with pytest.raises(type(error)) as raised:
        failing(name, error)
    assert raised.value is error


def test_every_wait_between_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the world and of one DP rank, whose first rank hands its requests on to the others."""
    bounds: dict[str, float] = {}

    class Group:
        def __init__(self, name: str, backend: str) -> None:
            self.name, self.backend = name, backend

        def _get_backend(self, device: torch.device) -> Group:
            assert device.type == "cpu" and self.backend == "gloo"
            return self

        def _set_default_timeout(self, timeout: timedelta) -> None:
            bounds[self.name] = timeout.total_seconds()

    def ranks(name: str, backend: str) -> SimpleNamespace:
        return SimpleNamespace(
            cpu_group=Group(f"{name} cpu", "gloo"), device_group=Group(f"{name} device", backend)
        )

    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    [hook] = [h for h in peers.hooks(CONFIG) if h.target.endswith(".run_event_loop")]
    for backend, expected in (
        ("gloo", {"world cpu", "world device", "dp cpu", "dp device"}),
        ("nccl", {"world cpu", "dp cpu"}),
    ):
        parallel = SimpleNamespace(
            tp_group=ranks("world", backend), attn_tp_group=ranks("dp", backend)
        )
        monkeypatch.setattr(runtime_context, "get_parallel", lambda parallel=parallel: parallel)
        bounds.clear()
        hook.fn(None)
        assert bounds == dict.fromkeys(expected, CONFIG.exchange_timeout)


@pytest.mark.parametrize("first", ["_check_processes", "running_phase_sigquit_handler", "wait"])
def test_whoever_sees_a_rank_ended_first_tells_why(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """SGLang's watchdog, the handler of a server that runs, the wait of an FFN command: any of
    them may end the command, and each of them alone must say why; together they say it once."""
    noted: list[str] = []
    monkeypatch.setattr(peers.causes, "note", lambda text, consequence: noted.append(text))
    found = {hook.target.rpartition(".")[2]: hook.fn for hook in peers.hooks(CONFIG)}
    controller, *ranks = [SimpleNamespace(exitcode=None) for _ in range(4)]
    outcome = SimpleNamespace(block_until_scheduler_exits=lambda: None)
    found["_launch_scheduler_processes"]((outcome, [controller, *ranks]))
    found["_check_processes"](None)
    assert not noted
    ranks[2].exitcode = -9

    def wait() -> None:
        with pytest.raises(SystemExit):
            outcome.block_until_scheduler_exits()

    tellers = {**found, "wait": wait}
    tellers[first](*[None] * (first == "_check_processes"))
    told = ["FFN rank 0 (world rank 2) was ended by SIGKILL; restart the deployment"]
    assert noted == told
    found["_check_processes"](None)
    found["running_phase_sigquit_handler"]()
    wait()
    assert noted == told
