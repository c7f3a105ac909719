"""What a running deployment tells: metrics of every step, traces, how busy each rank is.

Ranks are asked through SGLang's own internal state, which reaches every DP rank, so F's too.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from sglang_afd.context import current
from sglang_afd.observe.metrics import StepMetrics
from sglang_afd.observe.stages import StepTimes
from sglang_afd.observe.summary import RecentSteps
from sglang_afd.observe.trace import TraceRecorder
from sglang_afd.topology import Role
from sglang_afd.upstream.hooks import Hook, Kind

MOST_STEPS = 1000
"""Of a trace: a step of a large model has hundreds of spans."""

RECORD, SHOW, WATCH = "afd_trace_steps", "afd_trace_show", "afd_watch"
"""Keys of SGLang's internal state that ranks obey: record the next steps (0: stop and forget); show
the trace with the state (1) or not (0); say how busy the rank is (1), for `WATCHED` seconds."""

WATCHED = 30.0
"""Seconds: more than the page takes from one question to the next, by far."""

_STATE = "sglang.srt.managers.scheduler_components.internal_state"


class Telemetry:
    """What is asked of one rank at present."""

    def __init__(self) -> None:
        self._recorder: TraceRecorder | None = None
        self._recent: RecentSteps | None = None
        self._watch_until = 0.0
        self._show = False

    def obey(self, key: str, value: float) -> None:
        """Carry out one of `RECORD`, `SHOW`, `WATCH`."""
        timer = current().timer
        if key == SHOW:
            self._show = bool(value)
        elif key == WATCH:
            self._watch_until = time.monotonic() + WATCHED
            if self._recent is None:
                self._recent = RecentSteps()
                timer.subscribe(self._watch)
        else:
            timer.forget(self._record)
            self._recorder = None
            if value:
                self._recorder = self._new_recorder(int(value))
                timer.subscribe(self._record)

    def state(self) -> dict[str, Any]:
        """What this rank has to tell at present."""
        told: dict[str, Any] = {}
        if self._recent is not None:
            told["recent"] = msgspec.to_builtins(self._recent.summary())
        if self._show and self._recorder is not None:
            told["trace"] = msgspec.to_builtins(self._recorder.trace)
        return told

    def _watch(self, times: StepTimes) -> None:
        """Remember a step; once nobody has asked for long, none is timed for that any more."""
        assert self._recent is not None, "it is forgotten with the listener"
        self._recent(times)
        if time.monotonic() > self._watch_until:
            current().timer.forget(self._watch)
            self._recent = None

    def _record(self, times: StepTimes) -> None:
        """Keep a step; once there are enough, no step is timed for the trace any more."""
        assert self._recorder is not None, "it is forgotten with the recorder"
        self._recorder(times)
        if self._recorder.complete:
            current().timer.forget(self._record)

    def _new_recorder(self, steps: int) -> TraceRecorder:
        context = current()
        layers = list(context.exchanged)
        ffn = context.role is Role.FFN
        held = [list(context.held(layer)) for layer in layers] if ffn else []
        return TraceRecorder(
            context.rank, context.name, context.role.value, layers, steps, held, context.slots
        )


def hooks() -> tuple[Hook, ...]:
    """Hooks of every rank."""
    telemetry = Telemetry()

    def count_steps(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.runtime_context import get_observability

        if get_observability().enable_metrics:
            context = current()
            row_bytes = context.row_width * scheduler.model_config.dtype.itemsize
            context.timer.subscribe(
                StepMetrics(context.role.value, context.rank, row_bytes, len(context.exchanged))
            )

    def take_ours(handlers: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        from sglang.srt.managers.scheduler_components import internal_state

        ours = internal_state._UpdateHandler(_check, telemetry.obey)
        return {**handlers, RECORD: ours, SHOW: ours, WATCH: ours}

    def show(result: Any, *args: Any, **kwargs: Any) -> Any:
        result.internal_state["afd"].update(telemetry.state())
        return result

    return (
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.__init__",
            Kind.AFTER,
            count_steps,
            "--enable-metrics shows the steps of both roles on SGLang's own /metrics",
        ),
        Hook(
            f"{_STATE}.SchedulerInternalStateController._update_handlers",
            Kind.AFTER,
            take_ours,
            "every rank, also of F, can be told to record a trace",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
            Kind.AFTER,
            show,
            "traces and how busy the ranks are come with their internal state",
        ),
    )


def _check(key: str, value: float) -> None:
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    most = MOST_STEPS if key == RECORD else 1
    if value != int(value) or not 0 <= value <= most:
        raise UpdateRejected(f"{key} must be a whole number from 0 to {most}, not {value}")
