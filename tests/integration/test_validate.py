"""The validator passes what is right, and fails, with the reason, what is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_afd import embedded
from sglang_afd import start as start_command
from sglang_afd.gate import findings
from sglang_afd.observe.recording import Recordings
from sglang_afd.running import free_port
from sglang_afd.validation.report import Report
from tests.support import faults
from tests.support.layouts import STOCK
from tests.support.validating import SHORT, Validated, validator
from tests.support.world import World, Worlds

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Validate = Callable[..., Validated]
_LAYOUTS = {"1A1F": ("1", "1"), "2A1F": ("2", "1"), "2A2F": ("2", "2"), "1A2F": ("1", "2")}
_QUICK = {("1A1F", "hf", 1), ("2A1F", "sglang", 2), ("2A2F", "url", 1), ("1A1F", "hf", 2)}


def flags(layout: str) -> tuple[str, ...]:
    attention, ffn = _LAYOUTS[layout]
    return ("--afd-attention-ranks", attention, "--afd-ffn-ranks", ffn, *SHORT)


@pytest.fixture
def validate(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, cache_folder: Path, tmp_path: Path
) -> Validate:
    cache = cache_folder / "validate"
    cache.mkdir(exist_ok=True)
    return validator(worlds, monkeypatch, cache, tmp_path)


@pytest.fixture
def stock(start: Callable[..., World]) -> Callable[[], World]:
    """A server without AFD that is running already."""
    return lambda: start(STOCK.argv(str(embedded.path()))).wait_healthy(300)


def assert_localised(report: Report) -> None:
    """The report names the layer that the fault is in, and the expert."""
    layers = report.layers
    assert layers.available
    assert (layers.first_layer, layers.last_layer) == (faults.SPOILT_LAYER,) * 2
    assert f"layers {faults.SPOILT_LAYER} to {faults.SPOILT_LAYER}" in layers.note
    assert layers.suspects == [faults.SPOILT_EXPERT]
    assert layers.note in report.reasons


@pytest.mark.parametrize(
    ("layout", "reference", "lanes"),
    [
        pytest.param(*row, marks=() if row in _QUICK else pytest.mark.full)
        for row in itertools.product(("1A1F", "2A1F", "2A2F"), ("hf", "sglang", "url"), (1, 2))
    ],
)
def test_a_right_deployment_passes(
    validate: Validate,
    stock: Callable[[], World],
    tmp_path: Path,
    layout: str,
    reference: str,
    lanes: int,
) -> None:
    """And its report passes the gate of accuracy, for this deployment alone."""
    address = stock().url if reference == "url" else reference
    status, report = validate(*flags(layout), "--afd-lanes", str(lanes), "--reference", address)
    assert status == 0, report.reasons
    ran = [lane["steps"] for lane in report.candidate.configuration["afd"].get("lanes", [])]
    assert len(ran) == (lanes if lanes > 1 else 0) and all(ran), ran
    assert report.figures["top1_share"] == 1
    assert report.figures["greedy_equal_prompts"] == report.figures["prompts"] == 15
    assert report.layers.available == (reference != "url")
    if reference != "url":
        assert [error.layer for error in report.layers.layers] == [0, 1, 2, 3]
        assert report.reference.software["packages"]["torch"]
    assert report.candidate.checkpoint == report.reference.checkpoint != {}
    command = [*report.candidate.configuration["command"], "--port", str(free_port())]
    command += ["--afd-validation", str(tmp_path / "report.json")]
    assert not refusals(command)
    [refusal] = refusals([*command, "--dtype", "bfloat16"])
    assert "--dtype float32, this one has bfloat16" in refusal


def refusals(command: list[str]) -> list[str]:
    """What the gates refuse of a launcher's command line."""
    facts = start_command.read_facts(command, program="check")
    assert facts is not None
    return [finding.message for finding in findings(facts) if not finding.passed]


@pytest.mark.parametrize("reference", ["hf", "sglang"])
def test_an_expert_that_is_one_percent_off_is_named(
    validate: Validate, tmp_path: Path, reference: str
) -> None:
    status, report = validate(*flags("1A1F"), "--reference", reference, planted=faults.scale_expert)
    assert status == 1
    assert_localised(report)
    [folder] = tmp_path.glob("sglang_afd-validate-*/recorded-reference")
    recorded = Recordings(folder)
    chosen = recorded.read(faults.SPOILT_LAYER, "experts", sorted(recorded.rows))
    assert (chosen == faults.SPOILT_EXPERT).any(dim=1).float().mean() >= 0.05


@pytest.mark.parametrize(
    "fault", [faults.zero_expert, pytest.param(faults.swap_experts, marks=pytest.mark.full)]
)
def test_a_wrong_expert_shows_by_url_without_its_place(
    validate: Validate, stock: Callable[[], World], fault: Callable[[], None]
) -> None:
    status, report = validate(*flags("1A1F"), "--reference", stock().url, planted=fault)
    assert status == 1
    assert "logprob error" in " ".join(report.reasons)
    assert not report.layers.available
    assert "localisation is unavailable" in report.layers.note


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("1A2F", faults.serve_other_ranks_experts),
        pytest.param("1A1F", faults.drop_router_weights, marks=pytest.mark.full),
    ],
)
def test_a_fault_of_every_layer_begins_in_the_first(
    validate: Validate, layout: str, fault: Callable[[], None]
) -> None:
    status, report = validate(*flags(layout), planted=fault)
    assert status == 1
    assert report.layers.last_layer == 0 and "layers 0 to 0" in report.layers.note
    assert report.figures["top1_share"] < 0.9  # type: ignore[operator]


@pytest.mark.full
def test_bfloat16_passes_against_the_same_kernels(validate: Validate) -> None:
    """Not against HF, whose rounding decides this small model's experts otherwise."""
    status, report = validate(*flags("1A1F"), "--dtype", "bfloat16", "--reference", "sglang")
    assert status == 0, report.reasons
    assert report.thresholds.precision == "bfloat16"


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [("--afd-attention-tp", "2"), ("--chunked-prefill-size", "64", "--prompts", "mixed")],
    ids=["attention TP", "chunks"],
)
def test_layers_are_recorded_however_rows_are_dealt(
    validate: Validate, more: tuple[str, ...]
) -> None:
    status, report = validate(*flags("1A1F"), *more)
    assert status == 0, report.reasons
    assert len(report.layers.layers) == 4


def test_one_nan_fails(validate: Validate) -> None:
    """Of one token in one layer, although every other answer is right."""
    status, report = validate(*flags("1A1F"), planted=faults.nan_once)
    assert status == 1
    assert "not finite" in " ".join(report.reasons)
