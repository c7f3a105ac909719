"""Records: their verdicts, that nothing is written over, that they hold no paths; the table."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import __main__ as command
from benchmarks import decode, run, scripts, table
from benchmarks import record as records
from benchmarks.compare import compare
from benchmarks.configuration import Configuration, load
from benchmarks.record import BadRecord, reference_steps, save, without_paths
from benchmarks.record import load as load_record
from benchmarks.results_folder import Found, look, state_of
from sglang_afd.running import ServerFailed
from tests.support.benchmark_records import record, turn

pytestmark = pytest.mark.unit


def test_a_good_record_counts() -> None:
    made = record()
    assert made.verdict.counts and made.verdict.reasons == []
    assert made.figures["b"].step_ms == pytest.approx(10.05)
    assert made.figures["b"].tokens_per_s_per_gpu == pytest.approx(100 / 10.05 * 1000 / 2, rel=1e-3)
    assert made.figures["b"].against_baseline == pytest.approx(2)
    assert made.figures["a"].against_baseline == 1


def test_ratios_pair_turns_of_one_round() -> None:
    """The machine was slower in the second round: the ratio does not see it."""
    made = record(turn("a", 1, 20), turn("b", 1, 10), turn("a", 2, 40), turn("b", 2, 20))
    assert made.figures["b"].against_baseline == 2
    assert not made.verdict.counts


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (record(turn("a", 1, 20), turn("b", 1, 10), rounds=1), "at least twice"),
        (record(turn("a", 1, 20), turn("b", 1, 10), turn("a", 2, 20)), "round 2: not run: b"),
        (
            record(turn("a", 1, 20), turn("b", 1, 9), turn("a", 2, 20), turn("b", 2, 10)),
            "b: its turns differ by 10",
        ),
        (
            record(*record().turns[:3], turn("b", 2, 10, result={"problems": ["only 3 of 15"]})),
            "b, round 2: only 3 of 15",
        ),
        (
            record(*record().turns[:3], turn("b", 2, 10, failed="ServerFailed: gone\nlog")),
            "b, round 2: ServerFailed: gone",
        ),
    ],
    ids=["one round", "a turn missing", "not repeatable", "steps do not count", "failed"],
)
def test_what_does_not_count_says_why(made: records.Record, says: str) -> None:
    assert not made.verdict.counts
    assert any(says in reason for reason in made.verdict.reasons), made.verdict.reasons


@pytest.mark.parametrize(
    ("told", "emulated", "says"),
    [
        ({"ffn_ranks": 4}, ["b"], None),
        (None, [], None),
        ({"ffn_ranks": 4}, [], "b, round 1: the server emulates ranks, its system says otherwise"),
        (None, ["b"], "b, round 1: the server emulates no ranks, its system says otherwise"),
    ],
)
def test_a_record_is_marked_as_its_servers_are(
    told: dict[str, Any] | None, emulated: list[str], says: str | None
) -> None:
    """Also where the flags came with a system's `args`."""
    own = turn("b", 1, 10, result={"holdings": {"afd": {"emulated": told}}})
    rest = [turn("a", 1, 20), turn("a", 2, 20), turn("b", 2, 10)]
    made = record(own, *rest, emulated=emulated)
    assert made.verdict.reasons == ([says] if says else [])


def test_parts_of_a_script_that_failed_are_named() -> None:
    result = {"results": {"deepep": {"2048": {"failed": "exit codes [1, 1]"}}}}
    made = record(
        turn("", 1, 1, result={"ms": None, **result}),
        kind="transport", configuration={}, rounds=1, baseline="",
    )  # fmt: skip
    assert made.verdict.reasons == ["some, round 1: results.deepep.2048 failed: exit codes [1, 1]"]


@pytest.mark.parametrize(
    ("wanted", "verdict"),
    [(10.05, "pass"), (10.3, "pass"), (10.4, "fail"), (9.7, "fail"), (9.8, "pass")],
)
def test_a_reference_is_repeated_within_three_percent(wanted: float, verdict: str) -> None:
    assert record(reference={"b": wanted}).verdict.reference == verdict


def test_a_reference_needs_a_record_that_counts() -> None:
    slow = record(turn("a", 1, 20), turn("b", 1, 10), rounds=1, reference={"b": 10})
    assert slow.verdict.reference == "none"
    with pytest.raises(BadRecord, match="must count"):
        reference_steps(slow)
    assert reference_steps(record()) == {"a": pytest.approx(20.1), "b": pytest.approx(10.05)}


def test_a_system_of_the_reference_that_is_missing_fails_it() -> None:
    assert record(reference={"c": 10}).verdict.reference == "fail"


def test_nothing_is_written_over(tmp_path: Path) -> None:
    files = [save(record(), tmp_path) for _ in range(3)]
    assert [file.name for file in files] == ["some.json", "some-2.json", "some-3.json"]
    assert load_record(files[2]) == record()


def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    file = save(record(), tmp_path)
    content = json.loads(file.read_text())
    content["turns"][1]["result"]["ms"] = 5
    file.write_text(json.dumps(content))
    with pytest.raises(BadRecord, match="contradicts itself"):
        load_record(file)
    content["more"] = 1
    file.write_text(json.dumps(content))
    with pytest.raises(BadRecord, match="more"):
        load_record(file)


def test_paths_of_this_machine_are_named_instead(tmp_path: Path) -> None:
    value = {
        f"{tmp_path}/x": [f"see {tmp_path}/a.log", 3, None],
        "b": f"{records.ROOT}/benchmarks/run.py, {sys.prefix}/lib, {Path.home()}/y",
    }
    cleaned = without_paths(value, work=tmp_path)
    assert cleaned["WORK/x"][0] == "see WORK/a.log"
    assert cleaned["b"].startswith("CHECKOUT/benchmarks/run.py")
    assert str(Path.home()) not in json.dumps(cleaned)


@pytest.fixture
def decoding(tmp_path: Path) -> Configuration:
    file = tmp_path / "tiny.yaml"
    file.write_bytes(
        msgspec.yaml.encode({
            "kind": "decode", "regime": "Words.", "model": "embedded", "context": 4, "batch": 4,
            "baseline": "a",
            "systems": {"b": {"layout": "afd"}, "a": {"layout": "colocated", "gpus": 2}},
        })
    )  # fmt: skip
    return load(file)["tiny"]


Measured = Callable[[str, Any, Path], dict[str, Any]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose turn it was, in order; steps of 10 ms."""
    order: list[str] = []

    def measure(name: str, configuration: Any, work: Path) -> dict[str, Any]:
        order.append(name)
        if name == "b" and len(order) > 3:
            raise ServerFailed(f"b ended; its log {work}/b.log says so")
        return {"ms": 10.0, "gpus": 2, "requests": 8, "problems": [], "log": f"{work}/x.log"}

    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(run.environment, "describe", lambda: {"gpus": [], "packages": {}})
    return order


def test_systems_take_turns_and_a_failure_is_kept(
    decoding: Configuration, measured: list[str], tmp_path: Path
) -> None:
    draft = tmp_path / "draft.json"
    made = run.run("tiny", decoding, work=tmp_path / "w", command=[f"{tmp_path}/w/x"], draft=draft)
    assert measured == ["a", "b", "a", "b"], "A B A B, the baseline first"
    assert [bool(entry.failed) for entry in made.turns] == [False, False, False, True]
    assert "b, round 2: ServerFailed: b ended" in made.verdict.reasons[0]
    assert str(tmp_path) not in records.encode(made).decode()
    assert load_record(draft) == made


def test_the_command_writes_a_record_and_says_if_it_counts(
    decoding: Configuration,
    measured: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "w")]
    asked = ["run", str(tmp_path / "tiny.yaml"), *flags]
    assert command.main([*asked, "--repeat", "1"]) == 1
    assert "does not count: one round" in capsys.readouterr().out
    measured.clear()
    assert command.main([*asked, "--systems", "a"]) == 0
    [first, second] = sorted((tmp_path / "out").iterdir())
    assert second.name == "tiny.json" and first.name == "tiny-2.json"
    assert command.main([*asked, "--systems", "a", "--reference", str(first)]) == 0
    assert "reference within 3%: PASS" in capsys.readouterr().out
    content = re.sub(r'"environment".*?"configuration"', "", second.read_text(), flags=re.DOTALL)
    assert str(tmp_path) not in content


def test_a_script_is_run_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    program = package / "transport.py"
    program.write_text(
        "import json, sys\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\n"
        "json.dump({'identity': 1, 'args': sys.argv[3:]}, open(out, 'w'))\n"
    )
    monkeypatch.chdir(tmp_path)  # python -m looks here first
    file = tmp_path / "t.yaml"
    content = {"kind": "transport", "script": "transport", "gpus": 1, "regime": "Words."}
    file.write_bytes(msgspec.yaml.encode({**content, "args": ["--one-gpu"], "seconds": 30}))
    assert scripts.measure(load(file)["t"], tmp_path) == {"args": ["--one-gpu"]}
    program.write_text("raise SystemExit(3)")
    with pytest.raises(scripts.ScriptFailed, match="transport: 3"):
        scripts.measure(load(file)["t"], tmp_path)
    program.write_text("import time; time.sleep(60)")
    file.write_bytes(msgspec.yaml.encode({**content, "seconds": 1}))
    began, heeded = time.monotonic(), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(scripts.ScriptFailed, match="no end within 1 s"):
            scripts.measure(load(file)["t"], tmp_path)
    finally:
        signal.signal(signal.SIGINT, heeded)
    assert time.monotonic() - began < 30, "it did not heed the Ctrl-C that ends it"


def test_compare_says_what_differs_and_claims_no_ratio() -> None:
    other = record(
        *(msgspec.structs.replace(t, result={**t.result, "ms": 12}) for t in record().turns),
        environment={"gpus": ["NVIDIA B200, GPU-2, 1, 1 MiB"], "packages": {"sglang": "2"}},
        configuration={"systems": {"a": {"batch": 4}, "b": {}}},
    )
    said = "\n".join(compare(record(), other))
    assert "packages.sglang: 1 and 2" in said
    assert "gpus.0: NVIDIA H200" in said
    assert "configuration.systems.a.batch: None and 4" in said
    assert re.search(r"b, step, ms \| 10.05 \| 12 \| \+19.4% \| differs", said)
    assert "no speed-up" in said
    assert "equal within 3 %" in "\n".join(compare(record(), record()))


TRANSPORT = {
    "one_gpu": False,
    "results": {
        "nvlink": {
            "2048": [
                {"tokens": 1, "round_trip_us": 9.0},
                {"tokens": 16, "round_trip_us": 11.0},
                {"tokens": 16, "round_trip_us": 10.5},
            ]
        },
        "deepep": {"2048": {"failed": "exit codes [1, 1]"}},
    },
}
PREFILL = {
    "shape": {},
    "results": {
        "colocated": {"ms": 2.0, "tokens_per_s": 4096000.0},
        "blocks of 8192": {"ms": 2.5, "tokens_per_s": 3276800.0, "of_colocated": 0.8},
    },
}


def test_the_table_shows_all_and_the_unfavourable_too(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    slow = record(
        turn("a", 1, 10), turn("b", 1, 20), turn("a", 2, 10), turn("b", 2, 20), name="slow"
    )
    save(record(emulated=["b"]), folder)
    save(slow, folder)
    save(record(turn("a", 1, 20), turn("b", 1, 10), rounds=1, name="once"), folder)
    save(
        record(
            turn("", 1, 1, result={"ms": None, **TRANSPORT}),
            kind="transport", configuration={}, rounds=1, baseline="", name="trip",
        ),
        folder,
    )  # fmt: skip
    (folder / "prefill.json").write_text(json.dumps({"identity": {}, **PREFILL}))
    (folder / "other.json").write_text("[1]")
    out = tmp_path / "docs" / "performance.md"
    out.parent.mkdir()
    written = table.write([folder], out)
    assert [file.name for file in written] == ["performance.md", "performance.png"]
    said = out.read_text()
    assert "A regime in words." in said
    assert "| b (emulated) | 2 | 100 | 10.05 | 4,975 | 2.00 x |" in said
    assert "| b | 2 | 100 | 20.00 | 2,500 | **0.50 x: slower** |" in said
    assert "**Does not count**: one round" in said
    assert "| nvlink, hidden size 2048 | 9.0 | 10.5 |" in said
    assert "deepep, hidden size 2048: failed: exit codes [1, 1]" in said
    assert "The MoE layer of one prefill of 8192 tokens" in said
    assert "| blocks of 8192 | 2.500 | 3,276,800 | 0.80 |" in said
    for link in re.findall(r"\]\(([^)#:]+\.json)\)", said):
        assert (out.parent / link).exists()


def test_a_broken_record_is_not_passed_over(tmp_path: Path) -> None:
    file = save(record(), tmp_path)
    file.write_text(file.read_text().replace('"counts": true', '"counts": false'))
    with pytest.raises(BadRecord):
        look([tmp_path])
    with pytest.raises(SystemExit):
        command.main(["table", str(tmp_path)])


def test_the_document_is_that_of_the_results() -> None:
    """``python -m benchmarks table`` writes it."""
    found = look([records.RESULTS])
    wanted = table.document(found, table.DOCUMENT.parent)
    assert table.DOCUMENT.read_text() == wanted, "run python -m benchmarks table"


def test_states(decoding: Configuration) -> None:
    nothing = Found([], [])
    assert state_of("some", decoding, nothing) == "not run"
    one = Found([(Path("x"), record())], [])
    assert state_of("some", decoding, one) == "run 2026-11-30, counts"
    assert state_of("others", decoding, one) == "not run"
