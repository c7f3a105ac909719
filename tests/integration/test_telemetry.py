"""What a deployment tells of its steps: metrics, traces and the log say the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_afd import embedded, trace
from sglang_afd.observe import timeline
from sglang_afd.observe.trace import RankTrace, Trace, read
from sglang_afd.upstream import decode_log
from tests.support.layouts import A2F1
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = pytest.mark.integration

Labels = frozenset[tuple[str, str]]
WITHIN = 0.02
"""Relative difference between what metrics, trace and log say of the same steps."""
STEPS = 250


@pytest.fixture
def world(start: Callable[..., World]) -> Iterator[World]:
    """A deployment that tells everything."""
    argv = A2F1.argv(str(embedded.path()))
    env = decode_log.ENVIRONMENT
    made = start([*argv, "--enable-metrics", *decode_log.FLAGS], env=env).wait_healthy()
    yield made
    made.stop()


def series(world: World) -> dict[str, dict[Labels, float]]:
    """Our own samples on ``/metrics``, by name."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(world.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("sglang_afd_"):
                labels = frozenset(sample.labels.items())
                found.setdefault(sample.name, {})[labels] = sample.value
    return found


def of(rank: RankTrace, path: str, **more: str) -> Labels:
    labels = {"role": rank.role, "rank": str(rank.rank), "lane": "0", "path": path, **more}
    return frozenset(labels.items())


def load(world: World) -> None:
    """A request for each attention rank, of as many tokens."""
    asked = prompts([12, 12], seed=61)
    with ThreadPoolExecutor() as pool:
        done = [
            pool.submit(world.generate, prompt, STEPS, routed_dp_rank=rank)
            for rank, prompt in enumerate(asked)
        ]
        for each in done:
            each.result()


def test_metrics_trace_and_log_agree(world: World, tmp_path: Path) -> None:
    load(world)  # warm
    before, logged = series(world), len(world.log)
    assert world.post(f"/afd/trace?steps={STEPS + 50}").status_code == 200
    load(world)
    found = trace.recorded(world.url)
    after, log = series(world), world.log[logged:]

    def grown(name: str, labels: Labels) -> float:
        return after[name][labels] - before[name].get(labels, 0.0)

    assert [rank.role for rank in found.ranks] == ["attention", "attention", "ffn"]
    for rank in found.ranks:
        decodes = [step for step in rank.steps if step.path == "decode"]
        assert len(decodes) >= STEPS - 1
        assert grown("sglang_afd_step_seconds_count", of(rank, "decode")) == len(decodes)
        own = "attention" if rank.role == "attention" else "experts"
        for stage in (own, "dispatch" if rank.role == "attention" else "reply"):
            traced = sum(b - a for step in decodes for name, a, b in step.spans if name == stage)
            told = grown("sglang_afd_stage_seconds_total", of(rank, "decode", stage=stage))
            assert told == pytest.approx(traced, rel=WITHIN)
        exchanges = grown("sglang_afd_exchanges_total", of(rank, "decode"))
        assert exchanges == sum(step.rounds for step in decodes) * len(rank.layers)
    assert_log_agrees(log, found)
    assert_files(found, tmp_path)

    def grown_on(name: str, rank: RankTrace) -> float:
        paths = [of(rank, path) for path in ("decode", "bulk")]
        return sum(grown(f"sglang_afd_{name}_total", labels) for labels in paths)

    first, second, ffn = found.ranks
    sent = grown_on("exchanged_rows", first) + grown_on("exchanged_rows", second)
    rows, touched = grown_on("expert_rows", ffn), grown_on("touched_experts", ffn)
    assert grown_on("exchanged_rows", ffn) == sent
    top_k = json.loads((embedded.path() / "config.json").read_text())["num_experts_per_tok"]
    assert rows == top_k * sent
    assert 0 < touched <= rows


def assert_log_agrees(log: str, found: Trace) -> None:
    """SGLang's own step times, which the benchmarks are made of, are the trace's intervals."""
    lines = [line for line in decode_log.decode_lines(log.splitlines()) if line.rank == 0]
    told = [line.ms for last, line in pairwise(lines) if line.iteration == last.iteration + 1]
    traced = [s.interval for s in found.ranks[0].steps if s.path == "decode" and s.interval]
    assert min(len(told), len(traced)) > 0.9 * STEPS
    mean = sum(told) / len(told) / 1000
    assert sum(traced) / len(traced) == pytest.approx(mean, rel=WITHIN)
    assert timeline.overlap(found).step == pytest.approx(mean, rel=WITHIN)


def assert_files(found: Trace, folder: Path) -> None:
    """Saved, it can be read again and drawn."""
    saved, drawn, events = folder / "t.json", folder / "t.svg", folder / "p.json"
    trace.save(found, saved)
    argv = [str(saved), "--plot", str(drawn), "--perfetto", str(events)]
    assert trace.main(argv) == 0
    assert read(saved) == found
    assert "FFN rank 0" in drawn.read_text() and '"traceEvents"' in events.read_text()
