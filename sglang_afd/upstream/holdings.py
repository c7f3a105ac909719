"""Measures what this rank holds, at the points of the start where it can be measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from sglang_afd.context import current
from sglang_afd.observe.holdings import Holdings, table
from sglang_afd.topology import Role
from sglang_afd.transports import estimate
from sglang_afd.upstream.gather import gather
from sglang_afd.upstream.hooks import Hook, Kind

logger = logging.getLogger(__name__)

_PROC = Path("/proc/self")
_measured: dict[str, int] = {}
T = TypeVar("T")
_load_peak: int | None = None
_holdings: list[Holdings] = []


def measure_buffers(make: Callable[[], Any], group: Any) -> Any:
    """Make the transport; note how much device memory its group's communicator and it took.

    What other processes allocate on the same device in the meantime counts too.

    Args:
        group: the process group that the transport is made over.
    """
    if not torch.cuda.is_available():
        transport = make()
        _measured["communicator"] = 0
        _measured["buffers"] = 0  # gloo's tensors live for the length of a round
        return transport
    at_first = _free_device_bytes()
    # Creates the communicator; else the transport would, and its memory count as the transport's.
    torch.distributed.barrier(group)
    before = _free_device_bytes()
    transport = make()
    _measured["communicator"] = at_first - before
    _measured["buffers"] = before - _free_device_bytes()
    return transport


def measure_graphs(make: Callable[[], T]) -> T:
    """Record CUDA graphs; note how much device memory they took."""
    torch.cuda.empty_cache()  # recording begins with that, too
    before = _free_device_bytes()
    made = make()
    _measured["graphs"] = before - _free_device_bytes()
    return made


def _free_device_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def _measure_load(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    global _load_peak
    if runner.is_draft_worker:
        return original(runner, *args, **kwargs)
    peak = _CudaPeak() if torch.cuda.is_available() else _HostPeak()
    result = original(runner, *args, **kwargs)
    _load_peak = peak.bytes()
    return result


class _CudaPeak:
    """Peak of the device allocator since it was made."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before


class _HostPeak:
    """Peak resident memory of this process since it was made, where Linux lets it be reset."""

    def __init__(self) -> None:
        self._before: int | None = None
        try:
            (_PROC / "clear_refs").write_text("5")  # resets VmHWM
            _status_bytes("VmHWM")
            self._before = _status_bytes("VmRSS")
        except (OSError, ValueError) as error:  # containers and sandboxes may forbid it
            logger.warning("The peak of loading is not measured: %s", error)

    def bytes(self) -> int | None:
        return None if self._before is None else max(0, _status_bytes("VmHWM") - self._before)


def _status_bytes(field: str) -> int:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{_PROC}/status has no {field}")


def _exchange_holdings(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """All ranks learn all ranks' holdings; rank 0 logs them."""
    context = current()
    runner = scheduler.tp_worker.model_runner
    parameters = list(runner.model.parameters())
    weights = [*parameters, *runner.model.buffers()]
    buffers = estimate(
        context.config,
        context.facts,
        itemsize=scheduler.model_config.dtype.itemsize,
        fp8=scheduler.model_config.quantization == "fp8",
    )
    holds_kv = context.role is Role.ATTENTION
    drafts = scheduler.draft_worker._draft_model_runners() if scheduler.draft_worker else ()
    sizes: dict[str, float] = runner.graph_memory_usage or {}  # SGLang's graphs, GiB
    held = buffers.attention if holds_kv else buffers.ffn
    mine = Holdings(
        rank=context.name,
        role=context.role.value,
        experts=0 if context.role is Role.ATTENTION else len(context.own_slots),
        parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=sum(weight.nbytes for weight in weights),
        load_peak_bytes=_load_peak,
        kv_tokens=int(runner.max_total_num_tokens) if holds_kv else 0,
        kv_bytes=_kv_bytes(runner.token_to_kv_pool),
        draft_bytes=sum(_own_bytes(draft.model, weights) for draft in drafts),
        draft_kv_bytes=sum(_kv_bytes(draft.token_to_kv_pool) for draft in drafts),
        communicator_bytes=_measured["communicator"],
        buffer_bytes=_measured["buffers"],
        buffer_estimate_bytes=held.kept,
        passing_estimate_bytes=held.passing,
        graph_bytes=_measured.get("graphs", 0) + int(sum(sizes.values()) * 2**30),
    )
    _holdings[:] = gather(mine, Holdings, scheduler.tp_cpu_group)
    if context.rank == 0:
        logger.info("What the ranks hold:\n%s", table(_holdings))


def _own_bytes(draft: torch.nn.Module, target: Sequence[torch.Tensor]) -> int:
    """Bytes of the draft's weights that it does not share with the target."""
    shared = {weight.data_ptr() for weight in target}
    own = [*draft.parameters(), *draft.buffers()]
    return sum(weight.nbytes for weight in own if weight.data_ptr() not in shared)


def _kv_bytes(pool: Any) -> int:
    """SGLang's pools tell keys' and values' bytes, or one number where values are part of keys."""
    told = pool.get_kv_size_bytes()
    return int(sum(told) if isinstance(told, tuple) else told)


def _show_in_server_info(result: Any, *args: Any, **kwargs: Any) -> Any:
    context = current()
    result.internal_state["afd"] = {
        "config": msgspec.to_builtins(context.config),
        "emulated": context.config.emulation.described(),
        "simulated_acceptance": context.config.spec_sim_accept,
        "rank": context.name,
        "ranks": msgspec.to_builtins(_holdings),
    }
    return result


HOOKS = (
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        Kind.AROUND,
        _measure_load,
        "the peak of loading is measured, so that a role that holds too much is seen",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        Kind.AFTER,
        _exchange_holdings,
        "a deployment prints which rank holds what",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        Kind.AFTER,
        _show_in_server_info,
        "/server_info names the deployment and what its ranks hold",
    ),
)
