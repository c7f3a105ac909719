"""What Prometheus is told of every step of a rank, on SGLang's own ``/metrics``.

Nearly all series are counters: rates and ratios of them are the figures, over whatever time and
ranks the reader chooses.  docs/monitoring.md lists them, with the ratios that say most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_afd.observe.stages import EXCHANGE, StepTimes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

LABELS = ("role", "rank", "lane", "path")
_BUCKETS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1, 2, 5))
"""Seconds: 0.1 ms to 50 s."""


class Series(NamedTuple):
    """One time series, as the documentation lists it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


SERIES = (
    Series("step_seconds", "histogram", (), "the forward of a step on this rank"),
    Series(
        "step_interval_seconds",
        "histogram",
        (),
        "from one step's beginning to the next one's, where the rank had work all the time",
    ),
    Series(
        "plan_lead_seconds", "histogram", (), "from the ranks' agreement to the step's beginning"
    ),
    Series(
        "stage_seconds", "counter", ("stage",), "time in each stage of the steps and beside them"
    ),
    Series("exposed_seconds", "counter", (), "time in steps without own work: waiting, exchanging"),
    Series("replayed_steps", "counter", (), "steps replayed from graphs"),
    Series("exchanges", "counter", (), "exchanges with the other role, each of one layer"),
    Series("exchanged_rows", "counter", (), "rows sent in them (on ranks that serve: of all)"),
    Series(
        "exchanged_bytes", "counter", (), "bytes of those rows as they are sent, counted once a row"
    ),
    Series("counted_exchanges", "counter", (), "exchanges whose experts' rows were counted"),
    Series("expert_rows", "counter", (), "rows that this rank's experts got in those"),
    Series("busiest_expert_rows", "counter", (), "rows of each exchange's busiest expert"),
    Series("touched_experts", "counter", (), "experts that got rows, exchange by exchange"),
)
"""All have the labels of `LABELS`, and are named ``sglang_afd_…``."""


class StepMetrics:
    """Keeps one rank's series; a listener of its `StepTimer`."""

    def __init__(
        self,
        role: str,
        rank: int,
        row_bytes: float,
        layers: int,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Register the series; SGLang has set prometheus_client up for several processes.

        Args:
            role: as the label has it.
            rank: world rank.
            row_bytes: of one row as it is sent into a layer.
            layers: in which rows are exchanged.
            registry: of this process's own; None: prometheus_client's.
        """
        self._role, self._rank = role, str(rank)
        self._row_bytes, self._layers = row_bytes, layers
        self._of = {series.name: cache(_labelled(series, registry)) for series in SERIES}
        """Looking a label up takes longer than counting."""

    def __call__(self, times: StepTimes) -> None:
        """Count a step."""
        path = times.path.name.lower()
        labels = (self._role, self._rank, str(times.plan.lane), path)

        def of(name: str, *more: str) -> Any:
            return self._of[name]((*labels, *more))

        of("step_seconds").observe(times.end - times.start)
        of("plan_lead_seconds").observe(max(0.0, times.start - times.agreed))
        if times.interval is not None:
            of("step_interval_seconds").observe(times.interval)
        exposed = 0.0
        for stage, spent in times.by_stage().items():
            of("stage_seconds", stage.value).inc(spent)
            exposed += spent if stage in EXCHANGE else 0.0
        for stage, start, end in times.beside:
            of("stage_seconds", stage.value).inc(end - start)
        of("exposed_seconds").inc(exposed)
        of("replayed_steps").inc(times.replayed)
        exchanges = len(times.rounds) * self._layers
        rows = times.rows * self._layers
        of("exchanges").inc(exchanges)
        of("exchanged_rows").inc(rows)
        of("exchanged_bytes").inc(rows * self._row_bytes)
        if times.loads is not None:
            of("counted_exchanges").inc(len(times.loads))
            of("expert_rows").inc(int(times.loads.sum()))
            of("busiest_expert_rows").inc(int(times.loads.amax(dim=1).sum()))
            of("touched_experts").inc(int((times.loads > 0).sum()))


def _labelled(
    series: Series, registry: CollectorRegistry | None
) -> Callable[[tuple[str, ...]], Any]:
    from prometheus_client import REGISTRY, Counter, Histogram

    where = registry or REGISTRY
    name, labels = f"sglang_afd_{series.name}", (*LABELS, *series.labels)
    text = series.meaning.capitalize() + "."
    made: Counter | Histogram
    if series.kind == "histogram":
        made = Histogram(name, text, labels, buckets=_BUCKETS, registry=where)
    else:
        made = Counter(name, text, labels, registry=where)
    return lambda values: made.labels(*values)
