"""Emulated ranks in a served deployment: what F gets, what comes back, and that it is marked."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.layouts import A1F1, A1T2F1, SMALL, emulating, lanes, on, small
from tests.support.processes import wait_until
from tests.support.reference import Expect, check
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

TOP_K, LAYERS = 4, 4
"""Of the embedded model, which has 12 experts in each layer."""
ATTENTION = emulating(small(A1F1), attention=3)
LANES = lanes(ATTENTION, 2)
WIDE = emulating(small(A1T2F1), attention=3)
FFN = emulating(small(A1F1), ffn=2)
BOTH = emulating(small(A1F1), attention=3, ffn=2)


def counted(world: World, name: str, role: str, path: str) -> float:
    """One of our counters, summed over lanes and ranks."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(world.get("/metrics").text)
        for sample in family.samples
        if sample.name == f"sglang_afd_{name}_total"
        and (sample.labels["role"], sample.labels["path"]) == (role, path)
    )


def sent_and_got(world: World, path: str) -> tuple[float, float, float]:
    """Rows that real attention ranks sent, rows that F counts, and rows that its experts got."""
    return (
        counted(world, "exchanged_rows", "attention", path),
        counted(world, "exchanged_rows", "ffn", path),
        counted(world, "expert_rows", "ffn", path),
    )


def marks(world: World) -> list[dict[str, Any] | None]:
    states = world.get("/server_info").json()["internal_states"]
    return [
        *(state["afd"]["emulated"] for state in states),
        world.get("/afd/status").json()["emulated"],
    ]


@on(LANES, full=(ATTENTION,))
def test_emulated_attention_ranks(world: World, expect: Expect) -> None:
    """The real rank's answers stay right while F has three times its rows, in decode alone."""
    check(world, expect, prompts(), 40)

    def three_times() -> bool:
        sent, announced, got = sent_and_got(world, "decode")
        return sent > 0 and announced == 3 * sent and got == 3 * sent * TOP_K

    # a step is counted some steps later
    assert wait_until(three_times, 10), sent_and_got(world, "decode")
    sent, announced, got = sent_and_got(world, "bulk")
    assert 0 < sent == announced and got == sent * TOP_K
    for mark in marks(world):
        assert mark is not None and (mark["attention_ranks"], mark["ffn_ranks"]) == (3, 1)


@pytest.mark.full
@on(WIDE)
def test_emulated_attention_ranks_with_attention_tp(world: World, expect: Expect) -> None:
    """Each world rank stands for its likes; rows that pad a batch have no expert anywhere."""
    answers = check(world, expect, prompts(), 40)
    rows = LAYERS * 39 * len(answers)  # and some of steps behind a request's last one

    def three_times() -> bool:
        return rows <= sent_and_got(world, "decode")[2] / (3 * TOP_K) <= 1.1 * rows

    assert wait_until(three_times, 10), sent_and_got(world, "decode")


@on(BOTH, full=(FFN,))
def test_emulated_ffn_ranks(world: World, layout: Any) -> None:
    """F holds the first half of the experts, and A waits for no other."""
    answers = send(world, prompts(), 40)
    assert [len(answer.tokens) for answer in answers] == [40] * len(answers)
    afd = world.get("/server_info").json()["internal_states"][0]["afd"]
    assert [rank["experts"] for rank in afd["ranks"]] == [0, 6]
    attention, ffn = afd["ranks"]
    experts = LAYERS * 12 * 3 * 256 * 96  # three matrices each, hidden by inner size
    assert ffn["parameters"] == experts // 2 and attention["kv_tokens"] > 0
    times = 3 if layout is BOTH else 1

    def all_counted() -> bool:
        sent, announced, _ = sent_and_got(world, "decode")
        return sent >= LAYERS * 39 * len(answers) and announced == times * sent

    assert wait_until(all_counted, 10), sent_and_got(world, "decode")
    _, announced, got = sent_and_got(world, "decode")
    # two of four experts on average, more or less of them as the router likes this half
    assert 0.2 < got / (announced * TOP_K) < 0.8
    for mark in marks(world):
        assert mark is not None and (mark["attention_ranks"], mark["ffn_ranks"]) == (times, 2)


@on(SMALL)
def test_what_is_not_emulated_is_not_marked(world: World) -> None:
    assert set(marks(world)) == {None}
