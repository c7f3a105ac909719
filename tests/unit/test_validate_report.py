"""The verdict: a function of the report, told with its reasons, and read again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_afd.validate import __main__ as command
from sglang_afd.validate import plot
from sglang_afd.validation.report import (
    NO_LAYERS,
    Identity,
    Layers,
    Problem,
    Report,
    check,
    read,
    write,
)
from sglang_afd.validation.thresholds import THRESHOLDS
from tests.support.validation_reports import GOOD_LAYER, make, result

pytestmark = pytest.mark.unit


def wrong_layer(**changes: Any) -> Layers:
    error = msgspec.structs.replace(GOOD_LAYER, output_largest=3e-3, **changes)
    return Layers(
        available=True, note="the error begins in layers 0 to 0", layers=[error],
        first_layer=0, last_layer=0,
    )  # fmt: skip


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "another checkpoint": (
        {
            "reference": Identity(
                kind="hf", configuration={}, checkpoint={"model.safetensors": "bb"}, software={}
            )
        },
        "different checkpoints .model.safetensors",
    ),
    "a checkpoint without files": (
        {"reference": Identity(kind="hf", configuration={}, checkpoint={}, software={})},
        "different checkpoints .model.safetensors",
    ),
    "a problem": (
        {"problems": [Problem(side="candidate", prompt=1, what="refused with status 400")]},
        "candidate, prompt 1: refused with status 400",
    ),
    "a missing prompt": ({"results": [result(0)]}, "not compared: 1"),
    "nothing": ({"results": []}, "not compared: 0, 1"),
    "a short prompt": ({"results": [result(0), result(1, ranks=[1])]}, "not every token"),
    "fewer tokens than asked": (
        {"results": [result(0), result(1, tokens=1, ranks=[1], margins=[0], errors=[0])]},
        "prompt 1: not every token",
    ),
    "a rank": ({"results": [result(0), result(1, ranks=[1, 3])]}, "max rank is 3"),
    "a margin": ({"results": [result(0), result(1, margins=[0, 0.1])]}, "largest margin is 0.1"),
    "a logprob": ({"results": [result(0), result(1, errors=[0, 0.1])]}, "logprob error is 0.1"),
    "a decode logprob": (
        {"results": [result(0), result(1, decode_errors=[0, 0.1])]},
        "while decoding is 0.1",
    ),
    "a divergence": (
        {"results": [result(0), result(1, first_divergence=1, divergence_gap=0.5)]},
        "part at token 1, where the reference's token has a lead of 0.5 nats",
    ),
    "a divergence of unknown lead": (
        {"results": [result(0), result(1, first_divergence=0)]},
        "an unknown lead",
    ),
    "a layer": ({"layers": wrong_layer()}, "begins in layers 0 to 0"),
    "a layer without a place": (
        {"layers": msgspec.structs.replace(wrong_layer(), last_layer=None)},
        "a MoE layer's output is wrong",
    ),
    "other experts": ({"layers": wrong_layer(rerouted=5)}, "went to other experts"),
    "no layers at all": (
        {"layers": Layers(available=True, note="", layers=[])},
        "no MoE layer was compared",
    ),
}


def test_a_right_report_passes() -> None:
    made = make()
    assert made.verdict == "pass"
    [reason] = made.reasons
    assert "2 of 2 prompts" in reason and "1 MoE layers agree" in reason


def test_without_layers_a_report_can_pass() -> None:
    assert make(layers=NO_LAYERS).verdict == "pass"


def test_a_divergence_at_a_near_tie_passes() -> None:
    near = result(1, first_divergence=1, divergence_gap=1e-4)
    assert make(results=[result(0), near]).verdict == "pass"


def test_an_unseen_checkpoint_is_no_other_one() -> None:
    unseen = Identity(kind="url", configuration={}, checkpoint={}, software={})
    assert make(reference=unseen).verdict == "pass"


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_wrong_fails_and_is_named(name: str) -> None:
    import re

    changes, says = FAILURES[name]
    made = make(**changes)
    assert made.verdict == "fail"
    assert re.search(says, "\n".join(made.reasons)), made.reasons


@pytest.mark.parametrize("name", ["top1_share", "top10_share", "top100_share"])
def test_every_share_has_a_limit(name: str) -> None:
    figures = {**make().figures, name: 0.5}
    [reason] = THRESHOLDS["float32"].exceeded(figures)
    assert name.replace("_", " ") in reason


def test_a_figure_that_is_nan_is_over_its_limit() -> None:
    figures = {**make().figures, "mean_logprob_error": math.nan, "top1_share": math.nan}
    assert len(list(THRESHOLDS["float32"].exceeded(figures))) == 2


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = make()
    write(made, tmp_path / "report.json")
    assert read(tmp_path / "report.json") == made
    assert check(made) == []


@pytest.mark.parametrize(
    ("made", "status"), [(make(), 0), (make(results=[]), 1)], ids=["pass", "fail"]
)
def test_check_exits_by_the_verdict(made: Report, status: int, tmp_path: Path) -> None:
    write(made, tmp_path / "report.json")
    assert command.main(["check", str(tmp_path / "report.json")]) == status


def _forge(field: str, value: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        content[field] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_forge("verdict", "pass"), "its verdict is pass, but"),
        (_forge("verdict", "maybe"), "no report"),
        (_forge("extra", 1), "no report"),
        (_forge("version", 2), "version 2"),
        (_forge("seconds", None), "no report"),
        (lambda content: content["figures"].update(max_rank=1), "figures are not those"),
        (lambda content: content.pop("problems"), "no report"),
        (lambda content: content["results"][0]["errors"].__setitem__(0, None), "no report"),
    ],
)
def test_check_refuses_what_contradicts_itself(
    change: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    write(make(results=[result(0), result(1, ranks=[1, 3])]), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as end:
        command.main(["check", str(path)])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_check_of_no_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["check", str(tmp_path / "none.json")])
    assert end.value.code == 2 and "No such file" in capsys.readouterr().err


def test_the_plot_is_drawn_also_of_a_failure(tmp_path: Path) -> None:
    for made in (make(), make(results=[]), make(results=[result(0, margins=[0.0, 9.0])])):
        plot.draw(made, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 10_000
