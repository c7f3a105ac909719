"""Pairs of endpoints: who may be ranked, what is measured, and how it ends; long prompts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import pair
from benchmarks.pair import conclude
from benchmarks.pair_requests import BadWorkload, Round, Sample, figures_of, read
from sglang_afd import embedded
from sglang_afd.identity import checkpoint_content
from sglang_afd.validation import report
from sglang_afd.validation.report import Identity
from tests.support.validation_reports import make

pytestmark = pytest.mark.unit

LAYOUT = {"attention_ranks": 1, "ffn_ranks": 1, "attention_tp": 1, "transport": "gloo"}


class Fake:
    """An endpoint that streams tokens, at a pace, and says of itself what it is told to."""

    def __init__(self, model: Path) -> None:
        self.pace = 0.004
        """Seconds between tokens."""
        self.lost = 0
        """Tokens that every answer is short of."""
        self.asked: list[list[int]] = []
        self.info: dict[str, Any] = {
            "model_path": str(model),
            "dtype": "float32",
            "kv_cache_dtype": "auto",
            "tp_size": 2,
            "enable_dp_attention": True,
            "dp_size": 2,
            "load_format": "auto",
            "disaggregation_mode": "null",
            "cuda_graph_backend_decode": "disabled",
            "quantization": None,
            "internal_states": [{"afd": {"config": dict(LAYOUT), "exposed_ms": 1.5}}],
        }
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(fake.info).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.asked.append(body["input_ids"])
                self.send_response(200)
                self.end_headers()
                for count in range(1, body["sampling_params"]["max_new_tokens"] + 1 - fake.lost):
                    time.sleep(fake.pace)
                    event = {"meta_info": {"completion_tokens": count}}
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                    self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class Bench:
    """Two endpoints, a workload, a validation, and the command that pairs them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.model / "model.safetensors").write_bytes(b"weights")
        self.baseline, self.candidate = Fake(self.model), Fake(self.model)
        self.workload = folder / "workload.jsonl"
        lines = [json.dumps({"ids": list(range(number + 1))}) for number in range(6)]
        self.workload.write_text("\n".join(lines))
        self.validation: Path | None = folder / "validation.json"
        self.validate()

    def validate(self, **changes: Any) -> None:
        """Write a passing report of the candidate, but for `changes`."""
        checkpoint = checkpoint_content(self.model)
        configuration = {
            "arguments": {"dtype": "float32", "kv_cache_dtype": "auto"},
            "afd": {"config": {**LAYOUT, "max_tokens_per_rank": 128}},
        }
        side: dict[str, Any] = {"checkpoint": checkpoint, "software": {}}
        own = Identity(kind="afd", configuration=configuration, **side)
        other = Identity(kind="hf", configuration={}, **side)
        fields = {"candidate": own, "reference": other, **changes}
        assert self.validation is not None
        report.write(make(**fields), self.validation)

    def pair(self, *flags: str, label: str = "one") -> tuple[int, str]:
        """The command's status and output."""
        given = ["--validation", str(self.validation)] if self.validation else []
        status = command.main([
            "pair", "--baseline-url", self.baseline.url, "--candidate-url", self.candidate.url,
            "--workload", str(self.workload), "--label", label, "--out", str(self.folder / "out"),
            "--gpus", "2", "--new-tokens", "5", "--concurrency", "3", *given, *flags,
        ])  # fmt: skip
        return status, self._capsys.readouterr().out

    def record(self, label: str = "one") -> dict[str, Any]:
        return json.loads((self.folder / "out" / f"pair-{label}.json").read_text())


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    monkeypatch.setattr(pair.environment, "describe", lambda: {"gpus": []})  # takes seconds
    made = Bench(tmp_path, capsys)
    yield made
    made.baseline.stop()
    made.candidate.stop()


def test_a_faster_candidate_is_kept(bench: Bench) -> None:
    bench.baseline.pace = 0.03
    status, said = bench.pair()
    assert status == 0 and "keep: throughput +" in said
    made = bench.record()
    assert made["outcome"]["action"] == "keep" and made["outcome"]["ranked"]
    for side in ("baseline", "candidate"):
        figures = made["figures"][side]
        assert len(made["rounds"][side]) == 2
        assert all(len(each["samples"]) == 6 for each in made["rounds"][side])
        assert figures["failed"] == 0 and figures["exposed_ms"] == 1.5
    slow = made["figures"]["baseline"]
    assert slow["median_ttft_ms"] > 25 and slow["median_tpot_ms"] > 25
    assert made["figures"]["candidate"]["tokens_per_s"] > slow["tokens_per_s"]


def test_a_slower_candidate_is_rejected(bench: Bench) -> None:
    bench.candidate.pace = 0.03
    status, said = bench.pair()
    assert status == 1 and "reject: throughput -" in said
    assert bench.record()["outcome"]["ranked"]


def test_both_get_the_same_requests_in_seeded_order(bench: Bench) -> None:
    bench.pair("--concurrency", "1", "--repeat", "1")
    first = bench.baseline.asked
    assert first == bench.candidate.asked and sorted(map(len, first)) == [1, 2, 3, 4, 5, 6]
    bench.baseline.asked = []
    bench.pair("--concurrency", "1", "--repeat", "1", "--seed", "2", label="two")
    assert bench.baseline.asked != first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "bfloat16"}, "dtype differs"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "dtype differs"),
        ({"tp_size": 3}, "gpus differs: 2 and 3"),
        ({"disaggregation_mode": "decode"}, "stage differs"),
        ({"cuda_graph_backend_decode": None}, "graph differs"),
        ({"quantization": "fp8"}, "quantisation differs"),
        ({"load_format": "dummy"}, "checkpoint differs: load_format"),
        ({"model_path": "other/model"}, "checkpoint differs"),
        ({"model_path": None}, "checkpoint is not known: the candidate"),
        (
            {"internal_states": [{"afd": {"config": {**LAYOUT, "transport": "deepep"}}}]},
            "transport differs: gloo and deepep",
        ),
        (
            {"internal_states": [{"afd": {"config": dict(LAYOUT), "emulated": {"ffn_ranks": 4}}}]},
            "the candidate emulates ranks: its answers are not the model's",
        ),
    ],
)
def test_other_identities_are_not_ranked(bench: Bench, changes: dict[str, Any], says: str) -> None:
    bench.candidate.info |= changes
    status, said = bench.pair()
    assert status == 1 and said.count("reject: ") == 1 and says in said
    assert not bench.record()["outcome"]["ranked"]
    assert bench.baseline.asked == bench.candidate.asked == []


def test_another_checkpoint_of_the_same_name_is_noticed(bench: Bench) -> None:
    other = bench.folder / "moved" / "model"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_bytes(b"trained on")
    bench.candidate.info["model_path"] = str(other)
    assert "checkpoint differs: model.safetensors" in bench.pair()[1]


def test_the_same_checkpoint_elsewhere_may_be_ranked(bench: Bench) -> None:
    other = bench.folder / "moved" / "model"
    bench.model.rename(other.parent.mkdir() or other)
    bench.baseline.info["model_path"] = bench.candidate.info["model_path"] = str(other)
    bench.pair()
    assert bench.record()["outcome"]["ranked"]


def test_gpus_must_be_what_the_endpoints_say(bench: Bench) -> None:
    assert "the baseline says it has 2 GPUs, --gpus says 4" in bench.pair("--gpus", "4")[1]


def test_an_endpoint_without_afd_has_no_transport_to_differ(bench: Bench) -> None:
    bench.baseline.info["internal_states"] = [{}]
    bench.pair()
    made = bench.record()
    assert made["outcome"]["ranked"] and made["identities"]["baseline"]["transport"] is None
    assert made["figures"]["baseline"]["exposed_ms"] is None


def test_without_a_passing_validation_nothing_is_ranked(bench: Bench) -> None:
    file = bench.validation
    bench.validation = None
    assert "no validation report is given" in bench.pair()[1]
    bench.validation = file
    assert file is not None
    bench.validate(problems=[report.Problem(side="candidate", prompt=1, what="refused")])
    assert "the validation failed: candidate, prompt 1: refused" in bench.pair(label="failed")[1]
    file.write_text("{}")
    said = bench.pair(label="broken")[1]
    assert "validation.json is no report" in said and str(bench.folder) not in json.dumps(
        bench.record("broken")["outcome"]
    )
    bench.validate()
    file.write_text(file.read_text().replace('"verdict": "pass"', '"verdict": "fail"'))
    assert "contradicts itself" in bench.pair(label="forged")[1]


@pytest.mark.parametrize(
    ("config", "dtype", "says"),
    [
        ({**LAYOUT, "ffn_ranks": 2}, "float32", "validation is of layout"),
        (LAYOUT, "bfloat16", "validation is of dtype bfloat16"),
    ],
)
def test_a_validation_of_another_deployment_does_not_help(
    bench: Bench, config: dict[str, Any], dtype: str, says: str
) -> None:
    checkpoint = checkpoint_content(bench.model)
    configuration = {
        "arguments": {"dtype": dtype, "kv_cache_dtype": "auto"},
        "afd": {"config": config},
    }
    bench.validate(
        candidate=Identity(
            kind="afd", configuration=configuration, checkpoint=checkpoint, software={}
        )
    )
    assert says in bench.pair()[1]


def test_a_validation_of_another_checkpoint_does_not_help(bench: Bench) -> None:
    own = {"config.json": "00"}
    side: dict[str, Any] = {"configuration": {}, "checkpoint": own, "software": {}}
    bench.validate(candidate=Identity(kind="afd", **side), reference=Identity(kind="hf", **side))
    assert "the validation is of another checkpoint" in bench.pair()[1]


def test_a_label_is_used_once(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.pair()
    before = bench.record()
    bench.candidate.asked = []
    with pytest.raises(SystemExit) as ended:
        bench.pair()
    assert ended.value.code == 2 and "never written over" in capsys.readouterr().err
    assert bench.record() == before and bench.candidate.asked == []
    with pytest.raises(SystemExit):
        bench.pair(label="../one")


def test_short_answers_reject(bench: Bench) -> None:
    bench.candidate.lost = 1
    status, said = bench.pair()
    assert status == 1
    assert "12 requests to the candidate failed: 4 tokens came, not 5" in said
    assert not bench.record()["outcome"]["ranked"]


def test_an_endpoint_that_is_gone(bench: Bench) -> None:
    bench.candidate.stop()
    assert "checkpoint is not known: the candidate" in bench.pair()[1]


def test_the_record_names_no_folder_of_this_machine(bench: Bench) -> None:
    bench.pair()
    made = bench.record()
    made.pop("environment")
    assert str(bench.folder) not in json.dumps(made)


def rounds(*seconds: float, ttft: float = 10.0) -> list[Round]:
    sample = Sample(request=0, tokens=100, ttft_ms=ttft, tpot_ms=1.0)
    return [Round(seconds=each, samples=[sample], exposed_ms=None) for each in seconds]


@pytest.mark.parametrize(
    ("candidate", "action", "says"),
    [
        (rounds(0.9, 0.9), "keep", "+11.1%"),
        (rounds(0.98, 0.98), "tune", "equal within 3 %"),
        (rounds(1.02, 1.02), "tune", "equal within 3 %"),
        (rounds(1.05, 1.05), "reject", "-4.8%"),
        (rounds(0.99, 0.8), "tune", "not every round"),
        (rounds(0.9, 0.9, ttft=11.0), "tune", "median_ttft_ms +10.0%"),
    ],
)
def test_outcomes(candidate: list[Round], action: str, says: str) -> None:
    both = {"baseline": rounds(1.0, 1.0), "candidate": candidate}
    found = conclude([], both, {name: figures_of(own) for name, own in both.items()})
    assert found.action == action and found.ranked
    assert says in "; ".join(found.reasons)


def test_one_round_is_not_enough_to_keep() -> None:
    both = {"baseline": rounds(1.0), "candidate": rounds(0.5)}
    found = conclude([], both, {name: figures_of(own) for name, own in both.items()})
    assert found.action == "tune" and "one round alone" in "; ".join(found.reasons)


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"text": "a"}', '{"ids": []}', '{"ids": ["a"]}', "no json"]
)
def test_workloads_that_cannot_be_used(tmp_path: Path, content: str) -> None:
    file = tmp_path / "workload.jsonl"
    file.write_text(content)
    with pytest.raises(BadWorkload):
        read(file, seed=1, new_tokens=1, concurrency=1)
    with pytest.raises(BadWorkload):
        read(tmp_path / "none", seed=1, new_tokens=1, concurrency=1)


def test_long_prompts_have_exactly_the_asked_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, *flags: str) -> list[list[int]]:
        out = tmp_path / name
        asked = ["--tokenizer", str(embedded.path()), "--count", "3", "--out", str(out)]
        assert command.main(["prompts", *asked, *flags]) == 0
        return [json.loads(line)["ids"] for line in out.read_text().splitlines()]

    first = write("a", "--tokens", "8192")
    assert [len(ids) for ids in first] == [8192] * 3
    assert len({tuple(ids[:12]) for ids in first}) == 3, "no two share a prefix"
    assert write("b", "--tokens", "8192") == first
    assert write("c", "--tokens", "8192", "--seed", "2") != first
    longer = write("d", "--tokens", "16384")
    assert [len(ids) for ids in longer] == [16384] * 3
    assert read(tmp_path / "a", seed=1, new_tokens=1, concurrency=1).prompts
    with pytest.raises(SystemExit):
        write("a")
    with pytest.raises(SystemExit):
        command.main(["prompts", "--tokenizer", str(tmp_path), "--out", str(tmp_path / "e")])
