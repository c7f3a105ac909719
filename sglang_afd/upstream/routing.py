"""Request routing: F ranks never get a request, under any load-balance method."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_afd.config import AfdConfig
from sglang_afd.topology import Mode
from sglang_afd.upstream.hooks import Hook, Kind

logger = logging.getLogger(__name__)

_CONTROLLER = "sglang.srt.managers.data_parallel_controller"
_WATCHDOG_PERIOD_MS = 1000


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of the DP controller and of the tokenizer process."""
    attention = config.topology.leading_ranks
    afd = config.mode is Mode.AFD
    leading, serving = ("attention", "experts") if afd else ("model", "attention")

    def deactivate_ffn_ranks(_: None, controller: Any, *args: Any, **kwargs: Any) -> None:
        for dp_rank in range(attention, len(controller.status)):
            controller.status[dp_rank] = False
        controller._refresh_active_workers()

    def balance_over_attention_ranks(
        original: Callable[..., Any], budget: Any, *args: Any, **kwargs: Any
    ) -> Any:
        loads = budget.total_requests, budget.total_tokens, budget.num_dp_ranks
        budget.total_requests = loads[0][:attention]
        budget.total_tokens = loads[1][:attention]
        budget.num_dp_ranks = attention
        try:
            return original(budget, *args, **kwargs)
        finally:
            budget.total_requests += loads[0][attention:]
            budget.total_tokens += loads[1][attention:]
            budget.num_dp_ranks = loads[2]

    def follow_room_over_attention_ranks(
        original: Callable[..., Any], controller: Any, request: Any
    ) -> Any:
        workers = controller.workers
        controller.workers = workers[:attention]
        try:
            return original(controller, request)
        finally:
            controller.workers = workers

    def keep_ffn_ranks_inactive(_: None, controller: Any, *args: Any, **kwargs: Any) -> None:
        deactivate_ffn_ranks(None, controller)

    def wait_for_messages(controller: Any) -> None:
        from sglang.srt.managers.io_struct import sock_recv

        socket = controller.recv_from_tokenizer
        while True:
            controller.soft_watchdog.feed()
            if socket.poll(_WATCHDOG_PERIOD_MS):
                controller._request_dispatcher(sock_recv(socket))

    def refuse_other_ranks(_: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        # SGLang copies the deprecated spelling over only after this.
        wanted = getattr(request, "routed_dp_rank", None)
        if wanted is None:
            wanted = getattr(request, "data_parallel_rank", None)
        if wanted is not None and wanted not in range(attention):
            raise ValueError(
                f"DP rank {wanted} takes no requests: {leading} ranks are 0 to {attention - 1}"
                + (
                    f", the others run {serving}"
                    if attention <= wanted < config.topology.dp_size
                    else ""
                )
            )

    def route_only_to_attention_ranks(
        original: Callable[..., bool], controller: Any, request: Any
    ) -> bool:
        wanted = request.routed_dp_rank
        if wanted is not None and wanted not in range(attention):
            logger.error(
                "request %s names DP rank %s, which takes no requests, and was not refused; "
                "it goes to a rank that does",
                request.rid,
                wanted,
            )
            request.routed_dp_rank = None
        return original(controller, request)

    return (
        Hook(
            f"{_CONTROLLER}.DataParallelController.launch_dp_attention_schedulers",
            Kind.AFTER,
            deactivate_ffn_ranks,
            "round robin and direct routing go over active workers: F ranks are not",
        ),
        Hook(
            f"{_CONTROLLER}.DataParallelController.update_active_ranks",
            Kind.AFTER,
            keep_ffn_ranks_inactive,
            "a status update must not bring F ranks back",
        ),
        Hook(
            f"{_CONTROLLER}.DPBudget.dispatch",
            Kind.AROUND,
            balance_over_attention_ranks,
            "load balancing by requests or tokens ignores activity: restrict it to A ranks",
        ),
        Hook(
            f"{_CONTROLLER}.DataParallelController.follow_bootstrap_room_scheduler",
            Kind.AROUND,
            follow_room_over_attention_ranks,
            "rooms are spread modulo all workers: restrict them to A ranks",
        ),
        Hook(
            f"{_CONTROLLER}.DataParallelController.event_loop",
            Kind.REPLACE,
            wait_for_messages,
            "the controller spins on its socket, a core's worth that the ranks need on a CPU",
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
            Kind.BEFORE,
            refuse_other_ranks,
            "a request that names no A rank is the client's mistake: 400, not a lost request",
        ),
        Hook(
            f"{_CONTROLLER}.DataParallelController.maybe_external_dp_rank_routing",
            Kind.AROUND,
            route_only_to_attention_ranks,
            "the controller raises for such a request, and the whole server ends with it",
        ),
    )
