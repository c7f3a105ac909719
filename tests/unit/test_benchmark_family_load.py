"""The load on every family: what it starts passes the gates, and what it makes of a trace."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import family_load
from benchmarks.family_load import FAMILIES, REQUESTS, command_line, model_of, step_of
from sglang_afd import start
from sglang_afd.families import FAMILIES as SERVED
from sglang_afd.families import family_of
from sglang_afd.gate import findings
from sglang_afd.machine import Machine
from sglang_afd.observe.trace import BadTrace
from sglang_afd.running import free_port
from tests.unit.test_timeline import traced

pytestmark = pytest.mark.unit


def fake_tokenizer(folder: Path, vocabulary: int) -> None:
    (folder / "tokenizer.json").touch()


@pytest.mark.parametrize("name", FAMILIES)
def test_two_gpus_may_run_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_afd.machine import Gpu

    gpus = tuple(Gpu("H200", (9, 0), memory=139 << 30) for _ in range(2))
    monkeypatch.setattr(start, "this_machine", lambda: Machine(gpus))
    monkeypatch.setattr(family_load, "write_tokenizer", fake_tokenizer)
    folder, cut = model_of(name, tmp_path)
    argv = [*command_line(name, folder), "--port", str(free_port())]
    facts = start.read_facts(argv, program="check")
    assert facts is not None and facts.moe is not None
    refused = [finding for finding in findings(facts) if not finding.passed]
    assert not refused, refused
    served, whole = map(int, cut["layers"].split(" of "))
    assert served <= whole and max(facts.moe.layers) == served - 1
    experts = len(facts.moe.layers) * facts.moe.num_experts * 3
    fp8 = "quantization_config" in (facts.checkpoint.config or {})
    size = experts * facts.moe.hidden_size * facts.moe.intermediate_size * (1 if fp8 else 2)
    assert size < 100 << 30, "the FFN rank's GPU holds the experts"


def test_every_family_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_load, "write_tokenizer", fake_tokenizer)
    measured = set()
    for name in FAMILIES:
        config = json.loads((model_of(name, tmp_path)[0] / "config.json").read_text())
        measured.add(family_of(config["architectures"][0]).name)
    assert measured == {family.name for family in SERVED.values() if not family.wrapped}


def test_only_full_steps_count() -> None:
    trace = traced(0.35, 0.1)
    found = step_of(trace, 4)
    assert found["steps"] == 4 and found["step_ms"] == pytest.approx(1000)
    assert found["Ta_ms"] == pytest.approx(700) and found["Te_ms"] == pytest.approx(200)
    with pytest.raises(BadTrace):
        step_of(trace, 5)
    assert step_of(traced(0.2, 0.22, lanes=2), 8)["lanes"] == 2


def test_one_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, work: Path, out: Path) -> dict[str, Any]:
        if name == "minimax-m2.5":
            raise BadTrace("no step")
        return {"step": {"step_ms": 1.0}}

    monkeypatch.setattr(family_load, "measure", measure)
    monkeypatch.setattr(family_load, "share_kernels", lambda work: None)
    monkeypatch.setattr(family_load.environment, "describe", dict)
    argv = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert family_load.main(argv) == 1
    found = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    assert set(found) == set(FAMILIES)
    assert found["minimax-m2.5"]["failed"] == "BadTrace: no step"
    assert family_load.main([*argv, "--families", "qwen3.5"]) == 0


def test_steps_are_recorded_while_all_requests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Fake:
        url, start_seconds, running = "http://x", 1.0, 0

        def call(self, path: str) -> dict[str, Any]:
            asked.append(path)
            self.running += REQUESTS // 2
            return {"loads": [{"num_running_reqs": self.running}]}

    server = Fake()

    @contextmanager
    def serve(*args: Any, **more: Any) -> Any:
        yield server

    monkeypatch.setattr(family_load, "serve", serve)
    monkeypatch.setattr(family_load, "write_tokenizer", fake_tokenizer)
    monkeypatch.setattr(family_load, "holdings", lambda _: {"afd": {}})
    monkeypatch.setattr(family_load, "REQUESTS", 4)

    def bench(*_: Any) -> dict[str, Any]:
        import time

        time.sleep(1)
        return {"completed": 4}

    monkeypatch.setattr(family_load, "bench", bench)
    monkeypatch.setattr(family_load.trace, "record", lambda *_: traced(0.35, 0.1))
    found = family_load.measure("qwen3-30b-a3b", tmp_path, tmp_path)
    assert found["step"]["Ta_ms"] == pytest.approx(700) and found["layers"] == "48 of 48"
    assert asked == ["/v1/loads"] and "MODEL" in found["arguments"]
