"""The benchmark command measures real servers, on the CPU as it would on GPUs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import __main__ as command
from benchmarks import record
from sglang_afd import embedded, running
from sglang_afd.identity import checkpoint_content
from sglang_afd.validation import report
from sglang_afd.validation.report import Identity
from tests.support.layouts import A1F1
from tests.support.serving import serving
from tests.support.validation_reports import make
from tests.support.world import World, Worlds

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

AFD = {"layout": "afd", "attention_ranks": 2, "ffn_ranks": 1, "graphs": False}
TINY: dict[str, Any] = {
    "kind": "decode",
    "regime": "Words.",
    "model": "embedded",
    "dtype": "float32",
    "context": 32,
    "batch": 2,
    "warm_up": 2,
    "output": 40,
    "rounds": 1,
    "baseline": "afd",
    "systems": {"afd": AFD},
}


@pytest.fixture
def run(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., record.Record]:
    """``run(**changes)``: the record of `TINY` so changed; None takes a key away."""
    monkeypatch.setattr(running, "serve", serving(worlds))

    def measured(**changes: Any) -> record.Record:
        file = tmp_path / "tiny.yaml"
        wanted = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
        file.write_bytes(msgspec.yaml.encode(wanted))
        out = tmp_path / "out"
        status = command.main(["run", str(file), "--out", str(out), "--work", str(tmp_path)])
        made = record.load(out / "tiny.json")
        assert status == (not made.verdict.counts)
        return made

    return measured


def test_steps_of_a_deployment(run: Callable[..., record.Record]) -> None:
    """All at the full batch and past the prompts, one forward pass after the other; whether they
    are steady is the machine's affair."""
    began = time.monotonic()
    made = run()
    elapsed = (time.monotonic() - began) * 1000
    [turn] = made.turns
    assert not turn.failed
    steps = turn.result["steps"]
    assert len(steps) == 15
    first = steps[0]["iteration"]
    assert [step["iteration"] for step in steps] == list(range(first, first + 15))
    # A rank whose requests came first has decoded while the other prefilled: it holds more tokens.
    held = steps[0]["tokens"]
    assert min(held) >= 2 * (32 + 1 + 2)
    for index, step in enumerate(steps):
        assert step["requests"] == [2, 2] and not step["problem"] and not step["graph"]
        assert step["tokens"] == [tokens + 2 * index for tokens in held]
    assert sum(step["kept"] for step in steps) >= 12
    assert 0 < sum(step["ms"] for step in steps) < elapsed
    assert all("spread" in reason for reason in made.verdict.reasons)
    assert made.figures["afd"].tokens_per_s_per_gpu == pytest.approx(
        4 / turn.result["ms"] * 1000 / 3
    )
    assert [rank["role"] for rank in turn.result["holdings"]["afd"]["ranks"]] == [
        *("attention", "attention", "ffn"),
    ]
    rest = msgspec.to_builtins(made)
    rest.pop("environment")
    for place in (str(Path.home()), str(record.ROOT), str(embedded.path())):
        assert place not in json.dumps(rest)


def test_emulated_ranks_are_marked(run: Callable[..., record.Record]) -> None:
    """In the record, in its table and in what the server says; figures are those of all ranks."""
    small = {"layout": "afd", "graphs": False}
    emulated = {**small, "emulated_attention_ranks": 3, "emulated_ffn_ranks": 2}
    made = run(systems={"afd": emulated})
    [turn] = made.turns
    assert not turn.failed and made.emulated == ["afd"]
    steps = [step for step in turn.result["steps"] if step["kept"]]
    assert steps and all(step["requests"] == [2] for step in steps), "the real rank's alone"
    assert (turn.result["requests"], turn.result["gpus"]) == (6, 5)
    told = turn.result["holdings"]["afd"]
    assert (told["emulated"]["attention_ranks"], told["emulated"]["ffn_ranks"]) == (3, 2)
    assert [rank["experts"] for rank in told["ranks"]] == [0, 6]
    assert not any("emulates" in reason for reason in made.verdict.reasons)


@pytest.mark.full
def test_systems_that_stay_up_through_all_turns(run: Callable[..., record.Record]) -> None:
    """One lane and two take turns; each finds the KV of its prompts again."""
    one = {**AFD, "attention_ranks": 1}
    made = run(
        systems={"one": one, "two": {**one, "lanes": 2}},
        resident=True,
        rounds=2,
        baseline="one",
        output=None,
    )
    assert [turn.system for turn in made.turns] == ["one", "two"] * 2
    for turn in made.turns:
        assert not turn.failed
        assert len(turn.result["steps"]) == 15 and turn.result["output"] < 40
        assert all(step["requests"] == [2] and not step["problem"] for step in turn.result["steps"])
    assert made.turns[0].result["start_seconds"] == made.turns[2].result["start_seconds"]


@pytest.mark.full
def test_a_batch_that_the_server_does_not_take_at_once(run: Callable[..., record.Record]) -> None:
    made = run(args=["--max-running-requests", "2"])
    assert not made.verdict.counts
    assert "the batch was never full: 2 requests at most, not 4" in made.verdict.reasons[0]


@pytest.mark.full
def test_serving(run: Callable[..., record.Record]) -> None:
    load = {"kind": "serving", "input": 16, "output": 8, "requests": 8, "concurrency": 4}
    made = run(**load, context=None, batch=None, warm_up=None)
    [turn] = made.turns
    assert made.verdict.counts, made.verdict.reasons
    assert turn.result["completed"] == 8 and turn.result["total_output_tokens"] == 64
    assert turn.result["median_ttft_ms"] > 0


@pytest.mark.full
def test_a_real_pair(start: Callable[..., World], tmp_path: Path) -> None:
    """A deployment against itself: ranked, and every answer complete."""
    argv = A1F1.argv(str(embedded.path()))
    first, second = start(argv), start(argv)
    for world in (first, second):
        world.wait_healthy(300)
    info = second.get("/server_info").json()
    checkpoint = checkpoint_content(embedded.path())
    candidate = Identity(
        kind="afd",
        configuration={
            "arguments": {key: info[key] for key in ("dtype", "kv_cache_dtype")},
            "afd": info["internal_states"][0]["afd"],
        },
        checkpoint=checkpoint,
        software={},
    )
    reference = Identity(kind="hf", configuration={}, checkpoint=checkpoint, software={})
    report.write(make(candidate=candidate, reference=reference), tmp_path / "report.json")
    workload = tmp_path / "workload.jsonl"
    flags = ["--tokenizer", str(embedded.path()), "--count", "6", "--tokens", "64"]
    assert command.main(["prompts", *flags, "--out", str(workload)]) == 0
    command.main([
        "pair", "--baseline-url", first.url, "--candidate-url", second.url, "--label", "itself",
        "--workload", str(workload), "--gpus", "2", "--validation", str(tmp_path / "report.json"),
        "--new-tokens", "8", "--concurrency", "3", "--out", str(tmp_path),
    ])  # fmt: skip
    made = json.loads((tmp_path / "pair-itself.json").read_text())
    assert made["outcome"]["ranked"], made["outcome"]
    for figures in made["figures"].values():
        assert figures["failed"] == 0 and figures["median_ttft_ms"] > 0
        assert figures["median_tpot_ms"] > 0 and figures["exposed_ms"] is None
