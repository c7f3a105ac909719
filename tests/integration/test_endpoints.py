"""Endpoints of a running server: they answer for the attention ranks, and reach FFN ranks too."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from benchmarks.serving import Load, bench_command
from sglang_afd import embedded
from tests.support.client import Answer
from tests.support.layouts import CAP, RUNNING, SMALL, on
from tests.support.processes import cpu_seconds, wait_until
from tests.support.reference import Expect, assert_equal, check
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = [pytest.mark.integration, on(SMALL)]

CORES = 2
IDLE_SHARE = 0.15  # of the cores: what an idle server may use


def test_health(world: World) -> None:
    assert world.get("/health").status_code == 200
    assert world.get("/health_generate").status_code == 200


def test_server_info(world: World) -> None:
    """What every rank holds, on every rank; limits count attention ranks only."""
    states = world.get("/server_info").json()["internal_states"]
    assert len(states) == 3
    assert sorted(state["afd"]["rank"] for state in states) == [
        "FFN rank 0 (world rank 2)",
        "attention rank 0 (world rank 0)",
        "attention rank 1 (world rank 1)",
    ]
    for state in states:
        assert state["afd"]["config"]["max_tokens_per_rank"] == CAP
        first, second, ffn = state["afd"]["ranks"]
        assert (first["experts"], second["experts"], ffn["experts"]) == (0, 0, 12)
        assert first["kv_tokens"] == second["kv_tokens"] > 0 and ffn["kv_bytes"] == 0
        assert first["parameters"] == second["parameters"] > 0
    places = {state["effective_max_running_requests_per_dp"] for state in states}
    assert RUNNING in places, f"{2 * RUNNING} requests for 2 attention ranks, not {places} each"


def test_loads(world: World) -> None:
    """A snapshot for each attention rank, which take the requests; none of F, which takes none."""
    [prompt] = prompts([20], seed=41)
    stream = world.stream(prompt, 2000, routed_dp_rank=1)
    next(stream)
    running = lambda: [  # noqa: E731
        load["num_running_reqs"] for load in world.get("/v1/loads").json()["loads"]
    ]
    assert wait_until(lambda: running() == [0, 1], 10), running()
    stream.close()
    assert wait_until(lambda: running() == [0, 0], 10), running()


UNCOMPUTABLE = [
    ("/generate", {"text": ""}),
    ("/generate", {"text": ["fine", ""]}),
    ("/generate", {"input_ids": []}),
    ("/generate", {"input_ids": [999999]}),
    ("/generate", {"input_ids": [[5, 6], [7, -5]]}),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 5000}),
    ("/v1/completions", {"model": "x", "prompt": ""}),
    ("/v1/completions", {"model": "x", "prompt": [1, -1]}),
    ("/v1/completions", {"model": "x", "prompt": "a", "logprobs": 5000}),
]


def test_requests_that_no_rank_can_compute(world: World, expect: Expect) -> None:
    """They are the client's mistake, and no rank ends by them."""
    for path, body in UNCOMPUTABLE:
        assert world.post(path, body).status_code == 400, (path, body)
    check(world, expect, prompts([20], seed=45), 4)


def test_metrics(world: World) -> None:
    """Prometheus counters count what the attention ranks have served."""

    def served() -> float:
        rows = re.findall(
            r"^sglang:generation_tokens_total\{.*\} ([0-9.e+]+)$", world.get("/metrics").text, re.M
        )
        return sum(map(float, rows))

    [prompt] = prompts([10], seed=42)
    before = served()
    world.generate(prompt, 9)
    assert wait_until(lambda: served() == before + 9, 10), (before, served())


def test_flush_cache(world: World, expect: Expect) -> None:
    """Refused while a request runs; then every attention rank forgets its prefixes."""
    [prompt] = prompts([50], seed=43)
    for rank in (0, 1):
        check(world, expect, [prompt], 4, routed_dp_rank=rank)
        [again] = check(world, expect, [prompt], 4, routed_dp_rank=rank)
        assert again.cached_tokens == len(prompt) - 1
    stream = world.stream(prompt, 2000, routed_dp_rank=0)
    next(stream)
    assert world.post("/flush_cache").status_code == 400
    stream.close()
    assert world.post("/flush_cache", params={"timeout": 20}).status_code == 200
    for rank in (0, 1):
        [fresh] = check(world, expect, [prompt], 4, routed_dp_rank=rank)
        assert fresh.cached_tokens == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(world: World, expect: Expect, mode: str) -> None:
    """A pause holds requests of both ranks, running and new; they end right when it is over."""
    asked = prompts([20, 30, 8], seed=44)
    bodies: dict[int, dict] = {}

    def run(index: int) -> None:
        fields = {"routed_dp_rank": index % 2, "return_logprob": True}
        for body in world.stream(asked[index], 96, **fields):
            bodies[index] = body

    def made() -> list[int]:
        """Tokens of each request that has any."""
        return [body["meta_info"]["completion_tokens"] for body in bodies.copy().values()]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads[:2]:
        thread.start()
    assert wait_until(lambda: len(made()) == 2, 30, step=0.01)
    assert world.post("/pause_generation", {"mode": mode}).status_code == 200
    threads[2].start()
    time.sleep(0.5)  # what the ranks had made before is on its way
    before = made()
    time.sleep(1)
    assert made() == before and len(before) == 2, "a paused server must make no token"
    assert max(before) < 96, "no request was left to pause"
    assert world.post("/continue_generation", {}).status_code == 200
    for thread in threads:
        thread.join(60)
    answers = [Answer.of(bodies[index]) for index in range(3)]
    assert_equal(answers, expect(asked, 96))


def test_pause_by_abort(world: World, expect: Expect) -> None:
    asked = prompts([20, 8], seed=45)
    stream = world.stream(asked[0], 2000)
    next(stream)
    assert world.post("/pause_generation", {"mode": "abort"}).status_code == 200
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert world.post("/continue_generation", {}).status_code == 200
    check(world, expect, asked[1:], 8)


def test_abort_all(world: World, expect: Expect) -> None:
    """Requests of every attention rank end, and the next one is served."""
    asked = prompts([20, 30, 8], seed=46)
    streams = [world.stream(asked[rank], 2000, routed_dp_rank=rank) for rank in (0, 1)]
    for stream in streams:
        next(stream)
    assert world.post("/abort_request", {"abort_all": True}).status_code == 200
    for stream in streams:
        *_, last = stream
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    check(world, expect, asked[2:], 8)


def test_profile(world: World, tmp_path: Path) -> None:
    """Each rank writes a trace, FFN ranks included: theirs shows the experts at work."""
    body = {"output_dir": str(tmp_path), "activities": ["CPU"], "with_stack": False}
    assert world.post("/start_profile", body).status_code == 200
    world.generate(prompts([10], seed=47)[0], 3)
    assert world.post("/stop_profile").status_code == 200
    check_traces(tmp_path)


def test_bench_serving_profiles_both_roles(world: World, tmp_path: Path) -> None:
    """SGLang's own client, with --profile."""
    load = Load(input=8, output=4, requests=4, concurrency=2, seed=48, answer_seconds=200)
    command = bench_command(world.port, load, embedded.path(), tmp_path / "bench.jsonl")
    command += ["--profile", "--profile-activities", "CPU", "--profile-output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=load.answer_seconds)
    assert done.returncode == 0, done.stderr[-2000:]
    check_traces(tmp_path)


def check_traces(folder: Path) -> None:
    """Below `folder` each of the three ranks has written one trace."""
    traces = sorted(folder.rglob("*.trace.json.gz"), key=lambda trace: trace.name)
    assert [re.findall(r"TP-(\d)", trace.name) for trace in traces] == [["0"], ["1"], ["2"]]
    for trace in traces:
        names = {
            event.get("name")
            for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        }
        assert "aten::linear" in names or "aten::mm" in names, f"{trace.name} saw no GEMM"


def test_idle_server_sleeps(world: World) -> None:
    """With nothing to do all processes together use under 15 % of two cores; and wake up."""
    world.generate(prompts([10], seed=48)[0], 4)
    time.sleep(3)
    processes, seconds = world.processes(), 10
    before = cpu_seconds(processes)
    time.sleep(seconds)
    share = (cpu_seconds(processes) - before) / seconds / CORES
    assert share < IDLE_SHARE, f"an idle server uses {share:.0%} of {CORES} cores"
    start = time.monotonic()
    world.generate(prompts([10], seed=49)[0], 1)
    assert time.monotonic() - start < 1.5, "an idle server must wake up"
