"""The GitHub workflows: they parse, are bounded, and run what is there to be run."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(file: Path) -> dict[Any, Any]:
    return yaml.safe_load(file.read_text())


def commands(file: Path) -> list[str]:
    """Every line that a step runs."""
    steps = [step for job in workflow(file)["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def test_there_are_some() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_job_is_bounded_and_cannot_write(file: Path) -> None:
    content = workflow(file)
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        for step in job["steps"]:
            assert set(step) <= {"name", "id", "if", "uses", "with", "run"}, name
            assert ("uses" in step) != ("run" in step), name
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1")), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_run_is_there(file: Path) -> None:
    run = commands(file)
    for target in re.findall(r"\bmake ([\w-]+)", "\n".join(run)):
        done = subprocess.run(
            ["make", "--dry-run", target, "SGLANG_SRC=x"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    for module in re.findall(r"-m (sglang_afd[\w.]*)", "\n".join(run)):
        assert find_spec(module), module
    assert any("make test" in line for line in run)
    assert any("sglang_afd.hook_report" in line for line in run)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_runs_on_every_push_and_weekly(file: Path) -> None:
    triggers = workflow(file)[True]  # YAML reads the key `on` so
    assert "push" in triggers
    (cron,) = [entry["cron"] for entry in triggers["schedule"]]
    assert re.fullmatch(r"\d+ \d+ \* \* \d", cron), "once a week"
