"""A configuration's systems as servers: their command lines, and how they are started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.configuration import Afd, Colocated, System
from benchmarks.models import Model
from benchmarks.progress import starting
from sglang_afd import running
from sglang_afd.machine import this_machine
from sglang_afd.running import Server

_NOT_THE_MODEL = "--afd-emulation-is-not-the-model"


def command_line(
    system: System, model: Model, *, dtype: str, requests: int, common: list[str]
) -> list[str]:
    """Arguments of the system's server.

    Args:
        requests: of one attention DP rank at a time.
        common: flags that all systems of the configuration have.
    """
    own = _afd(system, requests) if isinstance(system, Afd) else _colocated(system)
    graphs = () if system.graphs else ("--cuda-graph-backend-decode=disabled",)
    return [
        *("--model-path", str(model.folder), *model.flags, "--dtype", dtype),
        # SGLang divides it over the ranks that take requests
        *("--max-running-requests", str(requests * system.ranks)),
        *own, *graphs, *common, *system.args,
    ]  # fmt: skip


def _afd(system: Afd, requests: int) -> list[str]:
    flags = [
        *("--afd-attention-ranks", str(system.attention_ranks)),
        *("--afd-ffn-ranks", str(system.ffn_ranks)),
        *("--afd-attention-tp", str(system.attention_tp)),
        *("--afd-transport", system.transport),
        *("--afd-max-tokens-per-rank", str(-(-requests // system.lanes))),
    ]
    if system.lanes > 1:
        flags += ["--afd-lanes", str(system.lanes)]
    if system.emulated_attention_ranks is not None:
        flags += ["--afd-emulate-attention-ranks", str(system.emulated_attention_ranks)]
    if system.emulated_ffn_ranks is not None:
        flags += ["--afd-emulate-ffn-ranks", str(system.emulated_ffn_ranks)]
    return [*flags, _NOT_THE_MODEL] if system.emulated else flags


def _colocated(system: Colocated) -> list[str]:
    flags = ["--tp-size", str(system.gpus)]
    if system.attention_dp > 1:
        flags += ["--dp-size", str(system.attention_dp), "--enable-dp-attention"]
        flags += ["--moe-dense-tp-size", "1", "--enable-dp-lm-head"]
    if system.expert_parallel > 1:
        flags += ["--ep-size", str(system.expert_parallel)]
    if system.exchange != "none":
        flags += ["--moe-a2a-backend", system.exchange]
    if system.exchange == "deepep":  # SGLang refuses its low-latency mode with other kernels
        flags += ["--moe-runner-backend", "deep_gemm", "--deepep-mode", "auto"]
    return flags


@contextmanager
def served(
    name: str,
    system: System,
    args: list[str],
    *,
    logs: Path,
    timeout: float,
    environment: Mapping[str, str],
) -> Iterator[Server]:
    """The system's server, healthy; gone when the block ends.

    Raises:
        ServerFailed: it did not start within `timeout` seconds, or does not end.
    """
    # Without a GPU the launcher of ours sets up the CPU platform, and adds nothing else.
    stock = isinstance(system, Colocated) and this_machine().has_accelerator
    with running.serve(
        name,
        args,
        logs=logs,
        port=running.free_port(),
        module="sglang.launch_server" if stock else "sglang_afd.launch_server",
        environment={
            "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
            **environment,
            **system.environment,
        },
        timeout=timeout,
        tick=starting(name),
    ) as server:
        yield server


def holdings(server: Server) -> dict[str, Any]:
    """What the server says of its memory, and of AFD where it has it; no paths."""
    states = server.call("/server_info").get("internal_states") or [{}]
    first = states[0]
    found = {"memory": first.get("memory_usage"), "afd": first.get("afd")}
    return {name: value for name, value in found.items() if value is not None}
