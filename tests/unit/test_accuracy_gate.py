"""The accuracy gate: a report counts for the deployment that it is of, and for no other."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_afd import accuracy_gate
from sglang_afd.facts import Facts
from sglang_afd.flags import EXPERT_RUNNERS, VALIDATION
from sglang_afd.gate import findings
from sglang_afd.identity import checkpoint_identity
from sglang_afd.validation import report
from sglang_afd.validation.report import CHECKPOINT, Identity
from tests.support import validation_reports
from tests.support.gate_facts import GPUS, make_facts, refused, write_model

pytestmark = pytest.mark.unit

GATE = "accuracy"
DTYPE = ("--dtype", "bfloat16")


def validated(facts: Facts, *flags: str, **changes: Any) -> Identity:
    """The candidate of a report of the deployment `facts`, which was started with `flags`."""
    config = msgspec.to_builtins(facts.config)
    ranks = [
        *("--afd-attention-ranks", str(facts.config.attention_ranks)),
        *("--afd-ffn-ranks", str(facts.config.ffn_ranks)),
    ]
    configuration = {
        "command": [*ranks, "--model-path", facts.checkpoint.path, *flags],
        "arguments": {"device": "cpu" if facts.on_cpu else "cuda"},
        "afd": {"config": config},
        CHECKPOINT: checkpoint_identity(facts.checkpoint.path),
    }
    packages = {name: version(name) for name in ("sglang", "sglang_afd")}
    return Identity(
        kind="afd",
        configuration={**configuration, **changes},
        checkpoint={"model.safetensors": "aa"},
        software={"packages": packages},
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def test_a_report_of_this_deployment_passes(model: Path, file: Path) -> None:
    for machine in (None, GPUS):
        flags = (*DTYPE, "--afd-validation", str(file))
        facts = make_facts(model, *flags, machine=machine)
        report.write(validation_reports.make(candidate=validated(facts, *DTYPE)), file)
        [found] = [finding for finding in findings(facts) if finding.gate == GATE]
        assert found.passed and not found.mend and str(file) in found.message, found


def test_without_a_report_it_warns(model: Path) -> None:
    [found] = [finding for finding in findings(make_facts(model)) if finding.gate == GATE]
    assert found.passed and "no report" in found.message
    assert "sglang_afd.validate" in found.mend and VALIDATION in found.mend


@pytest.mark.parametrize(
    "flags",
    [
        ("--load-format", "dummy"),
        ("--afd-emulate-ffn-ranks", "2", "--afd-emulation-is-not-the-model"),
    ],
)
def test_where_no_answer_is_the_model_s_nothing_is_asked_for(
    model: Path, flags: tuple[str, ...]
) -> None:
    facts = make_facts(model, *flags)
    assert not accuracy_gate.advice(facts) and "none to validate" in accuracy_gate.summary(facts)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--afd-ffn-ranks", "2"), "ffn_ranks 1, this one has 2"),
        (("--afd-lanes", "2"), "lanes 1, this one has 2"),
        (("--dtype", "float32"), "--dtype bfloat16, this one has float32"),
        (("--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype None, this one has fp8_e5m2"),
        (("--speculative-algorithm", "EAGLE3"), "--speculative-algorithm None"),
    ],
)
def test_of_another_deployment_it_counts_nothing(
    model: Path, file: Path, flags: tuple[str, ...], says: str
) -> None:
    was = make_facts(model, *DTYPE)
    report.write(validation_reports.make(candidate=validated(was, *DTYPE)), file)
    here = make_facts(model, *DTYPE, *flags, "--afd-validation", str(file))
    found = refused(here, GATE)
    assert any(says in refusal for refusal in found), found
    assert all("python -m sglang_afd.validate" in refusal for refusal in found)


def test_bounds_and_block_sizes_may_differ(model: Path, file: Path) -> None:
    was = make_facts(model)
    report.write(validation_reports.make(candidate=validated(was)), file)
    more = ("--afd-max-tokens-per-rank", "64", "--afd-prefill-block", "512")
    bounds = ("--afd-exchange-timeout", "5", "--afd-startup-timeout", "50")
    assert not refused(make_facts(model, *more, *bounds, "--afd-validation", str(file)), GATE)


def test_of_another_device_kernel_or_version_it_counts_nothing(model: Path, file: Path) -> None:
    facts = make_facts(model, "--afd-validation", str(file))
    for changes, says in (
        ({"arguments": {"device": "cuda"}}, "another device than cpu"),
        ({"afd": "not given"}, "attention_ranks None"),
        ({"command": ["--afd-attention-ranks", "x"]}, "cannot be read"),
        ({CHECKPOINT: {"weights": "others"}}, f"another checkpoint than {model}"),
    ):
        report.write(validation_reports.make(candidate=validated(facts, **changes)), file)
        found = refused(facts, GATE)
        assert any(says in refusal for refusal in found), (says, found)
    runner = ("--moe-runner-backend", EXPERT_RUNNERS["gloo"] + "_kernel")
    report.write(validation_reports.make(candidate=validated(facts, *runner)), file)
    assert any("--moe-runner-backend" in refusal for refusal in refused(facts, GATE))
    old = validated(facts)
    old.software["packages"]["sglang_afd"] = "0.0.0"
    report.write(validation_reports.make(candidate=old), file)
    assert any("it is of sglang_afd 0.0.0" in refusal for refusal in refused(facts, GATE))


def test_other_weights_of_the_same_shapes_are_another_checkpoint(model: Path, file: Path) -> None:
    facts = make_facts(model, "--afd-validation", str(file))
    report.write(validation_reports.make(candidate=validated(facts)), file)
    assert not refused(facts, GATE)
    weights = model / "model.safetensors"
    with weights.open("r+b") as opened:
        opened.seek(-weights.stat().st_size // 3, 2)
        opened.write(b"\x01" * (weights.stat().st_size // 3))
    assert "another checkpoint" in " ".join(refused(facts, GATE))


def test_what_failed_contradicts_itself_or_is_none_is_refused(model: Path, file: Path) -> None:
    facts = make_facts(model, "--afd-validation", str(file))
    assert "cannot be read" in " ".join(refused(facts, GATE))
    file.write_text("{}")
    assert "is no report" in " ".join(refused(facts, GATE))
    wrong = [validation_reports.result(0), validation_reports.result(1, ranks=[1, 9])]
    made = validation_reports.make(candidate=validated(facts), results=wrong)
    report.write(made, file)
    assert "the validation failed: " in " ".join(refused(facts, GATE))
    made.verdict = "pass"
    report.write(made, file)
    assert "contradicts itself" in " ".join(refused(facts, GATE))
