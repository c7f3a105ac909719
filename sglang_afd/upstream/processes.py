"""Which processes a command starts, with which ranks, and the bound on their start."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from typing import Any

from sglang_afd.config import AfdConfig
from sglang_afd.topology import Role
from sglang_afd.upstream import handshake
from sglang_afd.upstream.handshake import StartError
from sglang_afd.upstream.hooks import Hook, Kind

_ENGINE = "sglang.srt.entrypoints.engine"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_CONTROLLER_NAME = "the DP controller"  # the first of the processes; the ranks follow in order


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of the launching process and the DP controller."""
    deadline = cache(config.start_by)

    def local_rank_ranges(
        original: Callable[..., tuple[Any, Any, int, int]], node_rank: int
    ) -> tuple[Any, Any, int, int]:
        pp_ranks, _, pp_size_per_node, _ = original(node_rank)
        ranks = config.local_ranks()
        return pp_ranks, ranks, pp_size_per_node, len(ranks)

    def exchange_worker_ports(
        controller: Any, server_args: Any, worker_ports: list[int] | None = None
    ) -> list[int]:
        return handshake.worker_ports(config, controller, worker_ports, deadline())

    def launch_ranks(
        controller: Any,
        server_args: Any,
        port_args: Any,
        base_gpu_id: int,
        dp_rank: int | None,
        worker_ports: list[int] | None = None,
    ) -> None:
        readers = _hand_out_ranks(config, controller, server_args, port_args, worker_ports)
        infos = _await_ready(config, readers, deadline())
        controller._record_scheduler_init_infos([infos[rank] for rank in sorted(infos)])

    def skip_peer_ports(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if config.command_role is not Role.FFN:
            original(*args, **kwargs)

    def name_processes(
        watchdog: Any,
        processes: list[Any],
        process_names: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ours = [_CONTROLLER_NAME, *map(config.topology.name_of, config.local_ranks())]
        theirs = process_names or [f"process {index}" for index in range(len(processes))]
        return (watchdog, processes, [*ours, *theirs[len(ours) :]][: len(processes)], *args), kwargs

    return (
        Hook(
            "sglang.srt.utils.watchdog.SubprocessWatchdog.__init__",
            Kind.BEFORE,
            name_processes,
            "what ended is then called by its name: SGLang's scheduler_0 is the DP controller",
        ),
        Hook(
            f"{_ENGINE}._calculate_rank_ranges",
            Kind.AROUND,
            local_rank_ranges,
            "a command starts its role's ranks, which need not be an equal share of the world",
        ),
        Hook(
            f"{_CONTROLLER}._broadcast_worker_ports",
            Kind.REPLACE,
            exchange_worker_ports,
            "two commands meet here: within the start-up time, and with the same --afd-* flags",
        ),
        Hook(
            f"{_CONTROLLER}.launch_tensor_parallel_group",
            Kind.REPLACE,
            launch_ranks,
            "same ranges as above, and a bound on the start with the rank that missed it",
        ),
        Hook(
            "sglang.srt.utils.network.wait_port_available",
            Kind.AROUND,
            skip_peer_ports,
            "an FFN command binds none of these ports, and its peer on this host holds them",
        ),
    )


def _hand_out_ranks(
    config: AfdConfig, controller: Any, server_args: Any, port_args: Any, worker_ports: Any
) -> dict[int, Any]:
    """Tell every waiting scheduler process of this command its rank; return their pipes."""
    from sglang.srt.runtime_context import get_device
    from sglang.srt.server_args import PortArgs

    if controller.prelaunched_schedulers is None:
        raise StartError("SGLang did not pre-launch the schedulers; AFD starts them no other way")
    readers = {}
    for index, rank in enumerate(config.local_ranks()):
        dp_rank = config.topology.dp_rank_of(rank)
        ports = PortArgs.init_new(server_args, dp_rank, worker_ports)
        ports.nccl_port, ports.instance_id = port_args.nccl_port, port_args.instance_id
        gpu_id = get_device().base_gpu_id + index * get_device().gpu_id_step
        _, reader = controller.prelaunched_schedulers[0, rank]
        reader.send(((server_args, ports, gpu_id, rank, 0, dp_rank), (rank, dp_rank, rank)))
        readers[rank] = reader
    return readers


def _await_ready(
    config: AfdConfig, readers: dict[int, Any], deadline: float
) -> dict[int, dict[str, Any]]:
    """Wait until every rank of this command reported that it is ready.

    Raises:
        StartError: a rank ended, or the start-up time ran out.
    """
    waiting = {reader: rank for rank, reader in readers.items()}
    infos: dict[int, dict[str, Any]] = {}
    while waiting:
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(config.topology.name_of(rank) for rank in sorted(waiting.values()))
            raise StartError(
                f"not ready within {config.startup_timeout:g} s (--afd-startup-timeout): {late}; "
                f"check that every command of the deployment runs and that --dist-init-addr is "
                f"the address of the attention command"
            )
        for reader in ready:
            rank = waiting.pop(reader)
            try:
                infos[rank] = reader.recv()
            except EOFError:
                raise StartError(
                    f"{config.topology.name_of(rank)} ended while starting; its last log lines "
                    f"name the cause"
                ) from None
    return infos
