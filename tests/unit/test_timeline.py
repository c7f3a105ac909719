"""Traces: overlap by value, Perfetto's events, a figure, files that are none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_afd import trace as command
from sglang_afd.observe import timeline
from sglang_afd.observe.trace import BadTrace, RankTrace, Trace, TracedStep, read

pytestmark = pytest.mark.unit

LAYERS = [1, 3]


def step(
    number: int, begin: float, own: float, other: float, stages: str, **more: object
) -> TracedStep:
    """A decode step over two layers: own work and exchange take turns, own work ends it."""
    send, take, work = stages.split()
    order = [work, send, take] if work == "attention" else [take, work, send]
    lengths = {work: own, send: other / 4, take: other / 4}
    at, spans = begin, []
    for stage in order * 2:
        spans.append((stage, at, at + lengths[stage]))
        at += lengths[stage]
    values = {"step_id": number, "lane": 0, "path": "decode", "rows": 4, "rounds": 1}
    interval = None if number == 0 else 1.0
    times = {"agreed": begin, "start": begin, "end": at, "interval": interval, "spans": spans}
    return TracedStep(**{**values, **times, **more})


def traced(attention: float, experts: float, lanes: int = 1, **more: object) -> Trace:
    """Five steps a second apart; own work of each role in seconds a layer."""
    ranks = []
    for rank, (role, own, stages) in enumerate(
        [
            ("attention", attention, "dispatch combine attention"),
            ("ffn", experts, "reply receive experts"),
        ]
    ):
        steps = [
            step(number, number + lane / 8, own, 0.4, stages, lane=lane, **more)
            for number in range(5)
            for lane in range(lanes)
        ]
        ranks.append(RankTrace(rank, f"{role} rank 0 (world rank {rank})", role, LAYERS, 5, steps))
    return Trace({"sglang": "0"}, ranks)


def test_overlap_by_value() -> None:
    found = timeline.overlap(traced(0.35, 0.1))
    assert (found.steps, found.step) == (4, 1.0)
    assert (found.attention, found.experts) == (pytest.approx(0.7), pytest.approx(0.2))
    assert (found.exposed, found.efficiency) == (pytest.approx(0.3), pytest.approx(0.7))


def test_steps_without_stages_are_left_out() -> None:
    """The first ones of a trace, whose graphs' kernels took no moments yet."""
    trace = traced(0.35, 0.1)
    for rank in trace.ranks:
        rank.steps[1] = msgspec.structs.replace(rank.steps[1], spans=[])
    found = timeline.overlap(trace)
    assert (found.steps, found.attention) == (3, pytest.approx(0.7))


def test_lanes_add_up() -> None:
    found = timeline.overlap(traced(0.2, 0.22, lanes=2))
    assert (found.attention, found.experts) == (pytest.approx(0.8), pytest.approx(0.88))
    assert found.efficiency == pytest.approx(0.88)


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (Trace({}, []), "record more steps"),
        (traced(0.1, 0.1, interval=None), "record more steps"),
        (traced(0.1, 0.1, path="bulk"), "record more steps"),
        (traced(0.1, 0.1, spans=[]), "nothing tells the stages of step 1 "),
    ],
    ids=["empty", "apart", "prefills", "replayed"],
)
def test_no_overlap_can_be_told(trace: Trace, said: str) -> None:
    with pytest.raises(BadTrace, match=said):
        timeline.overlap(trace)


def test_events_carry_the_layer() -> None:
    events = timeline.perfetto(traced(0.3, 0.1))["traceEvents"]
    spans = [event for event in events if event.get("cat") == "stage" and event["pid"] == 1]
    assert [event["args"]["layer"] for event in spans[:6]] == [1, 1, 1, 3, 3, 3]
    assert spans[0]["ts"] == 0 and spans[0]["dur"] == pytest.approx(0.1e6)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"attention rank 0 (world rank 0)", "ffn rank 0 (world rank 1)"}


def test_a_figure(tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    timeline.draw(traced(0.3, 0.1, lanes=2), file)
    drawn = file.read_text()
    assert "ffn rank 0 (world rank 1), lane 1" in drawn and "decode step 2" in drawn
    with pytest.raises(BadTrace, match="no decode step"):
        timeline.draw(traced(0.3, 0.1, spans=[]), file)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'{"versions": {}}'])
def test_files_that_are_no_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    file = tmp_path / "t.json"
    if content is not None:
        file.write_bytes(content)
    assert command.main([str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trace: error:") and str(file) in said


def test_what_is_saved_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    command.save(traced(0.3, 0.1), file)
    assert read(file) == traced(0.3, 0.1)
    assert msgspec.json.decode(file.read_bytes())["ranks"][0]["role"] == "attention"
    assert command.main([str(file)]) == 0
    assert "decode step 1000.000 ms (mean of 4): attention 600.000 ms" in capsys.readouterr().out


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "is the server up there?" in capsys.readouterr().err
