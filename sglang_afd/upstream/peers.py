"""A rank that is lost is noticed in bounded time, and named.

Whichever rank dies or hangs, the others notice in one of three places: the exchange of a layer
(bounded and named by the transport), the step's synchronisation, or the broadcast of requests; the
latter two are SGLang's and would wait for two hours.  The command that started a rank then says how
it ended: an FFN command too, which SGLang lets end as if nothing had happened.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from sglang_afd import causes, rollcall
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext, current
from sglang_afd.dispatch.transport import ExchangeError
from sglang_afd.upstream.hooks import Hook, Kind

logger = logging.getLogger(__name__)

_GLOO = "gloo/"  # in its errors, which are plain RuntimeErrors: the file of its source
_RAN_OUT = 0.9  # share of the timeout from which a failed wait counts as one that ran out
_DYING = 1.0  # seconds that a killed process may take to be gone
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_COMPONENTS = "sglang.srt.managers.scheduler_components"


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of scheduler processes and of the process that starts them."""
    started: list[tuple[str, Any]] = []  # this command's ranks: name and process
    told: set[str] = set()  # those whose end is reported

    def bound_waits(scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel, timeout = get_parallel(), timedelta(seconds=config.exchange_timeout)
        for ranks in (parallel.tp_group, parallel.attn_tp_group):
            for group in (ranks.cpu_group, ranks.device_group):
                if torch.distributed.get_backend(group) == "gloo":
                    group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)

    def name_ranks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if _GLOO not in str(error):
                raise
            waited = time.monotonic() - began
            raise ExchangeError(
                f"{current().name} lost a peer between steps"
                f"{_missing(current(), waited)}: {error}; the log of the rank that ended or hung "
                f"first names the cause; restart the deployment"
            ) from error

    def remember_ranks(result: tuple[Any, list[Any]], *args: Any, **kwargs: Any) -> None:
        outcome, processes = result
        names = [config.topology.name_of(rank) for rank in config.local_ranks()]
        started[:] = zip(names, processes[1:], strict=True)  # the first is the DP controller
        wait_for_end = outcome.block_until_scheduler_exits

        def wait_and_report() -> None:
            wait_for_end()
            if _report(started, told):
                raise SystemExit(1)

        outcome.block_until_scheduler_exits = wait_and_report

    def report_ended(*args: Any, **kwargs: Any) -> None:
        # Peers of a killed rank see its connections go before its parent sees it end.
        deadline = time.monotonic() + _DYING
        while not any(process.exitcode for _, process in started) and time.monotonic() < deadline:
            time.sleep(0.02)
        _report(started, told)

    def report_crashed(watchdog: Any) -> None:
        _report(started, told)

    return (
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.run_event_loop",
            Kind.BEFORE,
            bound_waits,
            "between steps ranks wait for each other for two hours, in the start for weights",
        ),
        Hook(
            f"{_COMPONENTS}.dp_attn.exchange_sync_rows",
            Kind.AROUND,
            name_ranks,
            "gloo's error names no rank",
        ),
        Hook(
            f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks",
            Kind.AROUND,
            name_ranks,
            "gloo's error names no rank",
        ),
        Hook(
            f"{_ENGINE}._launch_scheduler_processes",
            Kind.AFTER,
            remember_ranks,
            "a command whose rank died ends with an error, an FFN command too",
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
            Kind.BEFORE,
            report_ended,
            "what a rank died of is known here alone if it was killed",
        ),
        Hook(
            "sglang.srt.utils.watchdog.SubprocessWatchdog._check_processes",
            Kind.BEFORE,
            report_crashed,
            "an FFN command, and one that starts, end by its signal, whose handler reports nothing",
        ),
    )


def _missing(context: RankContext, waited: float) -> str:
    """Who did not come, if a wait of `waited` seconds was one that ran out."""
    store = torch.distributed.distributed_c10d._get_default_store()
    timeout, topology = context.config.exchange_timeout, context.topology
    if waited < _RAN_OUT * timeout:
        rollcall.answer(store, context.rank)  # others' waits may run out because of this one's end
        return ""
    absent = rollcall.absent(store, context.rank, range(topology.world_size))
    names = ", ".join(map(topology.name_of, absent)) or "none, all wait for each other"
    return f" (not there within --afd-exchange-timeout, {timeout:g} s: {names})"


def _report(ranks: list[tuple[str, Any]], told: set[str]) -> bool:
    """Log how each of `ranks` that failed has ended, if it is not `told`; whether any has."""
    failed = [(name, process.exitcode) for name, process in ranks if process.exitcode]
    for name, code in failed:
        if name in told:
            continue
        told.add(name)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        logger.error("%s %s; its peers end with it: restart the deployment", name, how)
        causes.note(f"{name} {how}; restart the deployment", consequence=code > 0)
    return bool(failed)
