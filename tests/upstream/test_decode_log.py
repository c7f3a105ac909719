"""The decode line that benchmarks read is the one that SGLang writes."""

from __future__ import annotations

import inspect
import re

import pytest
from sglang.srt.debug_utils import log_parser
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler_components import metrics_reporter

from sglang_afd.upstream.decode_log import ENVIRONMENT, DecodeLine, decode_lines

pytestmark = pytest.mark.upstream

STEP = (
    "[2026-11-30 11:57:20 DP1 TP1 EP1] Decode batch [10], #running-req: 4, #token: 192, "
    "token usage: 0.01, cpu graph: False, gen throughput (token/s): 40.00, #queue-req: 2"
)
HYBRID = (
    "[2026-11-30 11:57:20] Decode batch [7], #running-req: 1, #full token: 9, full token usage: "
    "0.01, mamba num: 1, mamba usage: 0.10, cuda graph: True, gen throughput (token/s): 50.00, "
    "#queue-req: 0"
)


def test_a_line_is_read() -> None:
    assert decode_lines([STEP]) == [DecodeLine(1, 10, 4, 192, False, 100.0, 2)]


def test_a_rank_alone_has_no_number_and_hybrid_models_count_their_own_tokens() -> None:
    assert decode_lines([HYBRID]) == [DecodeLine(0, 7, 1, 9, True, 20.0, 0)]


def test_other_lines_are_passed_over() -> None:
    prefill = STEP.replace("Decode", "Prefill")
    without_time = STEP.replace("40.00", "0.00")
    without_number = STEP.replace(" [10]", "")
    assert decode_lines(["", prefill, without_time, without_number, "Decode batch"]) == []


def test_sglang_reads_the_same_line() -> None:
    """Its own parser of this line, whose pattern wants a rate and a comma behind the queue."""
    match = re.match(log_parser._PATTERN_DECODE, STEP + ",")
    assert match is not None
    assert (match["dp_rank"], match["num_running_req"], match["gen_throughput"]) == (
        *("1", "4", "40.00"),
    )


def test_sglang_still_writes_it() -> None:
    source = inspect.getsource(metrics_reporter.SchedulerMetricsReporter.report_decode_stats)
    order = ["Decode batch{iter_msg}, #running-req: ", "token_usage_msg", "_graph_backend_label",
             "gen throughput (token/s): ", "#queue-req: "]  # fmt: skip
    places = [source.index(part, source.index("msg = f")) for part in order]
    assert places == sorted(places)
    assert "self.num_generated_tokens / gap_latency" in source
    for name in ENVIRONMENT:
        assert getattr(envs, name).get() is False, "it is what turns the numbers on"
