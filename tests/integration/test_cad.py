"""Core-attention disaggregation (``--afd-mode cad``): what is its own.

That its tokens are those of HF transformers, whatever requests do, is shown by the tests of other
files that run on `tests.support.layouts.CAD` too.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sglang_afd.observe.trace import Trace
from sglang_afd.trace import describe
from tests.integration.test_failures import GONE_WITHIN
from tests.integration.test_memory import FLOAT32, held, stored
from tests.support.layouts import CAD, CAD_WIDER, CHUNK, Layout, on
from tests.support.processes import scheduler, wait_until
from tests.support.random_load import MAY_END, nothing_left, until_end
from tests.support.reference import Expect, assert_equal, check
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

TOKENS = 280  # of the tiny pool, of each model rank
TINY = replace(
    CAD,
    flags=("--max-total-tokens", str(TOKENS), "--schedule-conservativeness", "0.3"),
    note="tiny",
)
PAGE = 16
PAGED = replace(CAD, flags=(*CAD.flags, "--page-size", str(PAGE)), note="paged")


def roles(layout: Layout) -> list[str]:
    """The role of each rank, in order."""
    return ["model"] * layout.ffn + ["attention"] * layout.attention


@on(CAD, *CAD_WIDER)
def test_each_role_holds_its_part(
    world: World, layout: Layout, checkpoints: Callable[[str], Path]
) -> None:
    """Model ranks their slice of the experts, all other weights and no KV; attention ranks their
    heads' KV and no weights."""
    ranks = held(world)
    assert [rank["role"] for rank in ranks] == roles(layout)
    elements = stored(checkpoints(layout.checkpoint))
    experts = sum(count for name, count in elements.items() if ".experts." in name)
    whole = sum(elements.values()) - experts + experts // layout.ffn
    kv = [rank for rank in ranks if rank["role"] == "attention"]
    for rank in ranks:
        if rank["role"] == "model":
            assert rank["parameters"] == whole and rank["experts"] > 0, rank
            assert (rank["kv_tokens"], rank["kv_bytes"]) == (0, 0), rank
        else:
            assert (rank["parameters"], rank["weight_bytes"], rank["experts"]) == (0, 0, 0), rank
            assert rank["kv_tokens"] == kv[0]["kv_tokens"] > 0
    config = (checkpoints(layout.checkpoint) / "config.json").read_text()
    [heads] = re.findall(r'"num_key_value_heads": (\d+)', config)
    [layers] = re.findall(r'"num_hidden_layers": (\d+)', config)
    [width] = re.findall(r'"head_dim": (\d+)', config)
    of_token = 2 * int(heads) * int(layers) * int(width) * FLOAT32
    total = sum(rank["kv_bytes"] for rank in kv)
    assert total == pytest.approx(of_token * kv[0]["kv_tokens"], rel=0.01)


@on(*CAD_WIDER)
def test_pools_of_model_ranks_are_apart(world: World, layout: Layout, expect: Expect) -> None:
    """As many tokens at once as fit, on all model ranks: no rank's KV lies where another's is."""
    asked = prompts([40, 90, 60, 30, 75, 20], seed=91)
    turns = {"fields": lambda i: {"routed_dp_rank": i % layout.leading}}
    answers = send(world, asked, 32, delays=[0.0] * len(asked), **turns)
    assert_equal(answers, expect(asked, 32))
    assert {answer.dp_rank for answer in answers} == set(range(layout.leading))
    again = send(world, asked, 32, delays=[0.0] * len(asked), **turns)
    assert_equal(again, expect(asked, 32))
    assert all(answer.cached_tokens for answer in again)


@on(TINY)
def test_too_little_memory_for_all(world: World, expect: Expect) -> None:
    """Requests are taken back and done again: any two of them outgrow the pool, each alone fits."""
    asked = prompts([12, 10, 14], seed=68)
    expected = expect(asked, 160)
    assert all(until_end(answer.tokens) == answer.tokens for answer in expected)
    before = world.log.count("Retract requests")
    fields = {"sampling_params": MAY_END}  # the scheduler then hopes for short answers
    answers = send(world, asked, 160, delays=[0.0] * 3, fields=lambda _: dict(fields))
    assert_equal(answers, expected)
    assert world.log.count("Retract requests") > before, "memory was to be short"
    nothing_left(world)


@on(TINY)
def test_the_pool_is_what_the_attention_ranks_hold(world: World, expect: Expect) -> None:
    """It is used to the last page: flushed, filled, and filled again by others."""
    for seed in (92, 93, 94):
        check(world, expect, prompts([TOKENS - 40], seed=seed), 16)
    assert world.get("/server_info").json()["max_total_num_tokens"] == TOKENS


@on(CAD)
def test_a_prefix_that_two_requests_compute_at_once(world: World, expect: Expect) -> None:
    """The second one's copy is freed, and it goes on with the first one's pages."""
    [stem] = prompts([CHUNK + 30], seed=95)
    tails = prompts([3, 4, 5, 6], seed=96)
    asked = [stem + tail for tail in tails]
    filler = prompts([50] * 4, seed=97)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(check, world, expect, filler, 24)
        answers = send(world, asked, 48, delays=[0.0] * 4)
        other.result(120)
    assert_equal(answers, expect(asked, 48))


@on(CAD)
def test_metrics_of_both_roles(world: World, expect: Expect) -> None:
    check(world, expect, prompts([9], seed=98), 8)

    def counted() -> dict[str, float]:
        text = world.get("/metrics").text
        found = re.findall(r'sglang_afd_exchanged_rows_total{.*?role="(\w+)".*?} ([\d.e+]+)', text)
        return {role: float(value) for role, value in found}

    assert wait_until(lambda: counted().keys() == {"model", "attention"}, 20), counted()
    assert len(set(counted().values())) == 1, "what one role sends the other takes"


@on(PAGED)
def test_pages_of_several_tokens(world: World, expect: Expect) -> None:
    """A table names pages; prefixes are shared by whole ones."""
    [stem] = prompts([5 * PAGE + 3], seed=99)
    tails = prompts([1, PAGE, 2 * PAGE + 1], seed=100)
    check(world, expect, [stem], 3 * PAGE)
    answers = check(world, expect, [stem + tail for tail in tails], 2 * PAGE)
    assert all(answer.cached_tokens >= 5 * PAGE for answer in answers)
    nothing_left(world)


@on(CAD)
def test_a_trace_shows_the_stages_of_both_roles(world: World, expect: Expect) -> None:
    assert world.post("/afd/trace", params={"steps": 8}).status_code == 200
    check(world, expect, prompts([9], seed=101), 12)
    traced = msgspec.convert(world.get("/afd/trace").json(), Trace)
    by_role = {rank.role: rank for rank in traced.ranks}
    assert by_role.keys() == {"model", "attention"}
    for rank in traced.ranks:
        spans = {stage for step in rank.steps for stage, _, _ in step.spans}
        exchange = {"dispatch", "combine"} if rank.role == "model" else {"receive", "reply"}
        assert spans == {rank.role, *exchange} and len(rank.steps) == 8
    assert "the rest of the model" in describe(traced)


def test_a_rank_that_hangs_is_named(
    start: Callable[..., World], checkpoints: Callable[[str], Path]
) -> None:
    """The model rank waits for o, no longer than it is told to."""
    flags = (*CAD.argv(str(checkpoints(CAD.checkpoint))), "--afd-exchange-timeout", "5")
    world = start(flags).wait_healthy()
    stream = world.stream(prompts([8])[0], 2000)
    next(stream)
    scheduler(world.pid, roles(CAD).index("attention")).send_signal(signal.SIGSTOP)
    assert world.wait_gone(GONE_WITHIN + 10) == 1
    named = [
        f"model rank 0 (world rank 0) failed {doing} attention rank 0"
        for doing in ("waiting for rows of", "telling its step to", "sending rows to")
    ]
    lost = "attention rank 0 (world rank 1)"
    assert lost in world.last_line, world.tail()
    moments = (*named, "lost a peer between steps")
    assert any(moment in world.log for moment in moments), world.tail()


@pytest.mark.parametrize("lost", ["model", "attention"])
def test_a_lost_rank_is_named(
    start: Callable[..., World], checkpoints: Callable[[str], Path], lost: str
) -> None:
    world = start(CAD.argv(str(checkpoints(CAD.checkpoint)))).wait_healthy()
    stream = world.stream(prompts([8])[0], 2000)
    next(stream)
    scheduler(world.pid, roles(CAD).index(lost)).kill()
    assert world.wait_gone(GONE_WITHIN) == 1
    assert world.last_line.startswith(f"launch_server: error: {lost} rank 0"), world.tail()
