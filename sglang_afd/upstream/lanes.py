"""Several lanes (``--afd-lanes``): the scheduler's own loop, and what it must know of all lanes.

With one lane nothing here is installed, and SGLang's loops run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.context import current
from sglang_afd.upstream import lane_parts, quarantine
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.lane_loop import LaneLoop

_MODULE = "sglang.srt.managers.scheduler"
_SCHEDULER = f"{_MODULE}.Scheduler"


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of a scheduler process; none with one lane."""
    if config.lanes == 1:
        return ()
    loop: LaneLoop
    runner_parts: list[dict[str, Any]] = [{}] * (config.lanes + 1)

    def make_parts(_: None, runner: Any, *args: Any, **kwargs: Any) -> None:
        context = current()
        if context.leads and runner.device == "cuda":
            runner_parts[:] = lane_parts.runner_parts(runner, context)

    def run(scheduler: Any) -> None:
        nonlocal loop
        from sglang.srt.utils import DynamicGradMode

        if not scheduler.enable_overlap:
            raise ConfigError(
                f"--afd-lanes {config.lanes} needs SGLang's overlap scheduler, which is off here; "
                f"leave out the flag that turned it off, or use --afd-lanes 1"
            )
        scheduler.enable_continuous_input_polling = False
        scheduler.enable_skip_finishing_decode = True
        with DynamicGradMode():
            loop = LaneLoop(scheduler, current(), runner_parts)
            loop.run()

    def and_drained(idle: bool, *args: Any, **kwargs: Any) -> bool:
        return idle and loop.drained()

    def settle(scheduler: Any, request: Any) -> None:
        if request.mode != "in_place":
            loop.settle()

    def count_everyone(
        reporter: Any, can_run_graph: bool, running_batch: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shown = copy.copy(running_batch)
        shown.reqs = loop.everyone.reqs
        return (reporter, can_run_graph), {"running_batch": shown, **kwargs}

    def show_lanes(result: Any, *args: Any, **kwargs: Any) -> Any:
        result.internal_state["afd"]["lanes"] = [
            {"requests": lane.running.batch_size(), "steps": lane.steps} for lane in loop.lanes
        ]
        return result

    def retract(
        original: Callable[..., tuple[list[Any], float, list[Any]]], batch: Any
    ) -> tuple[list[Any], float, list[Any]]:
        from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (
            NewTokenRatioTracker,
        )

        if batch.check_decode_mem():
            return original(batch)  # SGLang's test of retraction; memory is not short
        taken = loop.make_room(batch)
        aborted: list[Any] = []
        if not batch.is_empty() and not batch.check_decode_mem():
            _, _, aborted = original(batch)  # the one request left, in a pool too small for it
        everyone = loop.everyone.reqs
        ratio = NewTokenRatioTracker.estimate_new_token_ratio_after_retract(everyone)
        return taken, ratio, aborted

    return (
        *quarantine.HOOKS,
        Hook(
            "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu",
            Kind.REPLACE,
            lambda server_args: None,
            "lanes stand on the overlap scheduler, with speculation too, as on a GPU",
        ),
        Hook(
            f"{_MODULE}.dispatch_event_loop",
            Kind.REPLACE,
            run,
            "SGLang's loops have one decode batch",
        ),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
            Kind.AFTER,
            make_parts,
            "lanes that run beside one another need graphs and buffers of their own",
        ),
        Hook(
            f"{_SCHEDULER}.is_fully_idle",
            Kind.AFTER,
            and_drained,
            "nothing may be flushed while a lane has a result to read",
        ),
        Hook(
            f"{_SCHEDULER}.pause_generation",
            Kind.BEFORE,
            settle,
            "a pause takes back the requests of every lane, with all their tokens",
        ),
        Hook(
            "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
            ".report_decode_stats",
            Kind.BEFORE,
            count_everyone,
            "the running requests that are reported are those of all lanes",
        ),
        Hook(
            f"{_SCHEDULER}.get_internal_state",
            Kind.AFTER,
            show_lanes,
            "/server_info shows whether requests are spread over the lanes",
        ),
        Hook(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
            Kind.AROUND,
            retract,
            "a lane short of memory takes it from any lane; the last request of one lane is not "
            "the last of all, which alone SGLang may abort",
        ),
    )
