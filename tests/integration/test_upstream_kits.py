"""SGLang's own test kits, which its wheel ships: no test fails on AFD that passes without it."""

from __future__ import annotations

import unittest
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tests.support.layouts import SMALL, on
from tests.support.world import World

pytestmark = [pytest.mark.integration, pytest.mark.full]  # `make test-upstream` runs them, too

KITS = (
    "basic_api_contract_kit.BasicAPIContractMixin",
    "json_constrained_kit.JSONConstrainedMixin",
    "json_mode_kit.JSONModeMixin",
    "regex_constrained_kit.RegexConstrainedMixin",
    "ebnf_constrained_kit.EBNFConstrainedMixin",
    "matched_stop_kit.MatchedStopMixin",
    "basic_scheduler_stress_kit.BasicSchedulerStressMixin",
    "abort_timeout_kit.AbortAllMixin",
    "pause_generation_kit.PauseResumeInPlaceMixin",
)
"""Those whose tests ask a server anything that a small model can answer; others start servers of
their own, on GPUs, or measure a large model's accuracy."""
CHANCE = ("complex_json", "custom_log_format")
"""Ends of the names of tests that sample text of any length: whether it ends in time is chance."""
MOST_PASS = 0.6
"""Share of the tests that must pass, for the kits to say anything: some ask what a small model does
not know."""
SMALLER = {
    "abort_all_num_requests": 8,
    "abort_all_max_new_tokens": 400,
    "abort_all_sleep": 0.2,
    "pause_max_new_tokens": 400,
    "pause_num_requests": 4,
    "pause_duration": 1,
}
"""The sizes of the tests' requests that a small model's context does not hold, or take long."""


def cases(world: World) -> list[unittest.TestCase]:
    """Every test of the kits, asking `world`."""
    shared: dict[str, Any] = {
        "base_url": world.url,
        "model": "default",
        "process": SimpleNamespace(poll=lambda: world.exit_code),
        "client": openai.Client(api_key="none", base_url=f"{world.url}/v1"),
    }
    found: list[unittest.TestCase] = []
    for name in KITS:
        module, _, kit = name.partition(".")
        mixin = getattr(import_module(f"sglang.test.kits.{module}"), kit)
        sizes = {field: value for field, value in SMALLER.items() if hasattr(mixin, field)}
        made = type(kit, (mixin, unittest.TestCase), {**shared, **sizes})
        found += unittest.defaultTestLoader.loadTestsFromTestCase(made)
    return [test for test in found if not _name(test).endswith(CHANCE)]


def failures(tests: list[unittest.TestCase]) -> dict[str, str]:
    """Run the tests; what failed, and how."""
    result = unittest.TestResult()
    unittest.TestSuite(tests).run(result)
    return {_name(test): text for test, text in (*result.failures, *result.errors)}


def _name(test: unittest.TestCase) -> str:
    return f"{type(test).__name__}.{test._testMethodName}"


@on(SMALL)
def test_kits(world: World, request: pytest.FixtureRequest) -> None:
    tests = cases(world)
    failed = failures(tests)
    assert world.exit_code is None, world.tail()
    assert len(failed) <= (1 - MOST_PASS) * len(tests), "\n".join(failed.values())
    if failed:
        there = [test for test in cases(request.getfixturevalue("stock")) if _name(test) in failed]
        passes = failed.keys() - failures(there).keys()
        assert not passes, "\n".join(f"{name}: {failed[name]}" for name in sorted(passes))
