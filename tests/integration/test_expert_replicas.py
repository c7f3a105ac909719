"""Experts with several slots, in any place, on the FFN ranks: the answers stay the model's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_afd import trace
from sglang_afd.placement import COUNT, MAP
from tests.support.families import ROWS
from tests.support.layouts import SMALL, Layout, lanes, on, small
from tests.support.reference import References, assert_equal
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

NEW_TOKENS = 16
EXPERTS, LAYERS = 8, 3  # of the checkpoint ``seeded``
PLACED = {
    MAP: [
        [*((layer + slot) % EXPERTS for slot in range(EXPERTS)), layer, layer + 1]
        for layer in range(LAYERS)
    ]
}
"""Two experts of each layer have a slot on either rank; the others lie elsewhere in every layer."""


def flags(replicas: int, file: Path | None = None) -> tuple[str, ...]:
    placed = ("--afd-expert-placement", str(file)) if file else ()
    return ("--afd-expert-replicas", str(replicas), *placed)


@pytest.fixture
def serve(
    start: Callable[..., World], checkpoints: Callable[[str], Path], references: References
) -> Callable[..., trace.Trace]:
    """Start a layout with more flags, check its answers, stop it; what its ranks did."""

    def run(layout: Layout, more: Iterable[str]) -> trace.Trace:
        checkpoint = checkpoints(layout.checkpoint)
        world = start([*small(layout).argv(str(checkpoint)), *more]).wait_healthy()
        assert world.post("/afd/trace?steps=1000").status_code == 200
        asked = prompts([5, 40, 20, 9, 70], seed=73)
        answers = send(world, asked, [NEW_TOKENS] * len(asked))
        assert_equal(answers, references.greedy(checkpoint, asked, NEW_TOKENS))
        found = trace.recorded(world.url)
        world.stop()
        return found

    return run


def used(found: trace.Trace) -> list[list[int]]:
    """For each F rank, rows that each of its slots got in the first MoE layer."""
    return [
        [sum(rows) for rows in zip(*(step.expert_rows[0] for step in rank.steps))]  # type: ignore
        for rank in found.ranks
        if rank.experts
    ]


FULL = [
    pytest.param(layout, replicas, marks=pytest.mark.full, id=f"{layout}-{replicas}")
    for layout, replicas in (
        (Layout(1, 1, tp=2, checkpoint="seeded"), 2),
        *((Layout(2, 2, checkpoint=name), 2) for name in ROWS),
    )
]


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [pytest.param(Layout(1, 3, checkpoint="seeded"), 1, id="1A3F-1"), *FULL],
)
def test_more_slots_than_experts(
    serve: Callable[..., trace.Trace], layout: Layout, replicas: int
) -> None:
    """In order, then the first again: so experts need not divide over the ranks either."""
    found = serve(layout, flags(replicas))
    # with attention TP the first world rank of each tells
    experts = [sum(len(rows) for rows in used(found)), found.ranks[-1].slots // layout.tp]
    assert experts[0] == experts[1] and len(used(found)) == layout.ffn


def test_experts_with_several_slots(serve: Callable[..., trace.Trace], tmp_path: Path) -> None:
    """Placed by a file; what was counted then places them anew."""
    layout = Layout(1, 2, checkpoint="seeded")
    file, counts = tmp_path / "placed.json", tmp_path / "counts.json"
    file.write_text(json.dumps(PLACED))
    found = serve(layout, flags(2, file))
    first, second = used(found)
    # experts 0 and 1 of layer 0 are in slots 0 and 8, and 1 and 9: the last two of the second rank
    for here, there in ((first[0], second[3]), (first[1], second[4])):
        assert abs(here - there) <= 0.5 * (here + there), (first, second)
        assert min(here, there) > 0
    saved = tmp_path / "trace.json"
    trace.save(found, saved)
    assert trace.main([str(saved), "--expert-counts", str(counts)]) == 0
    told = json.loads(counts.read_text())[COUNT]
    assert len(told) == LAYERS and told[0][0] == first[0] + second[3]
    again = serve(layout, flags(2, counts))
    assert len(used(again)) == 2


@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.full)], ids="{}lanes".format
)
def test_experts_are_placed_anew_while_requests_run(
    start: Callable[..., World],
    checkpoints: Callable[[str], Path],
    references: References,
    count: int,
) -> None:
    """They wait, keep their KV, and go on; a table that does not fit changes nothing."""
    layout, checkpoint = small(Layout(2, 2, checkpoint="seeded")), checkpoints("seeded")
    layout = lanes(layout, count) if count > 1 else layout
    world = start([*layout.argv(str(checkpoint)), *flags(2)]).wait_healthy()
    asked = prompts([20, 9], seed=74)
    streams = [world.stream(one, 160, routed_dp_rank=rank) for rank, one in enumerate(asked)]
    bodies = [next(stream) for stream in streams]
    answer = world.post("/afd/experts", PLACED)
    assert answer.status_code == 200, answer.text
    first = [body["meta_info"]["completion_tokens"] for body in bodies]
    for stream, one in zip(streams, asked, strict=True):
        *_, last = stream
        assert tuple(last["output_ids"]) == references.greedy(checkpoint, [one], 160)[0].tokens
    assert max(first) < 100, "no request was left to wait"

    def held() -> list[list[int]]:
        assert world.post("/afd/trace?steps=1").status_code == 200
        return [rank.experts[1] for rank in trace.recorded(world.url).ranks if rank.experts]

    assert held() == [PLACED[MAP][1][:5], PLACED[MAP][1][5:]]
    refused = world.post("/afd/experts", {MAP: [[0]]})
    assert refused.status_code == 400 and "has 1 rows" in refused.text
    counts = {COUNT: [[900, *range(1, EXPERTS)]] * LAYERS}
    assert world.post("/afd/experts", counts).status_code == 200
    assert all(0 in experts for experts in held()), "the busiest expert lies on both ranks"
    assert_equal(send(world, asked, [8, 8]), references.greedy(checkpoint, asked, 8))
    crowd(world, str(checkpoint))
    assert_equal(send(world, asked, [8, 8]), references.greedy(checkpoint, asked, 8))
    world.stop()


def crowd(world: World, checkpoint: str) -> None:
    """Placements, updates and a pause at the same time: each is answered, and none undoes another.

    SGLang keeps one answer of an update in mind; the others would never come.
    """
    update = {"model_path": checkpoint}
    with ThreadPoolExecutor(6) as pool:
        several = [pool.submit(world.post, "/afd/experts", PLACED, timeout=60) for _ in range(3)]
        several.append(pool.submit(world.post, "/update_weights_from_disk", update, timeout=60))
        time.sleep(0.05)
        paused = pool.submit(world.post, "/pause_generation", {"mode": "in_place"}, timeout=60)
        codes = [one.result().status_code for one in several]
        assert 200 in codes and set(codes) <= {200, 400}, codes
        assert paused.result().status_code == 200
        asked = pool.submit(world.generate, "one", 2)
        time.sleep(0.5)
        assert not asked.done(), "the pause holds"
        assert world.post("/continue_generation", {}).status_code == 200
        assert asked.result().tokens
    manifest = {**update, "manifest": {"afd_experts": {MAP: [[0]]}}}
    refused = world.post("/update_weights_from_disk", manifest)
    assert refused.status_code == 400 and "POST /afd/experts" in refused.text


@on(SMALL)
def test_experts_in_order_stay_there(world: World) -> None:
    answer = world.post("/afd/experts", PLACED)
    assert answer.status_code == 400 and "start with --afd-expert-replicas" in answer.text
