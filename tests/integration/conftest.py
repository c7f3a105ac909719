"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.layouts import Layout
from tests.support.reference import Expect, References


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    """The layout of the test's shared world."""
    return request.node.callspec.params["world"]


@pytest.fixture
def expect(references: References, checkpoints: Callable[[str], Path]) -> Expect:
    """What the embedded model answers: ``expect(prompts, new_tokens)``."""
    embedded = checkpoints("embedded")
    return lambda asked, new_tokens: references.greedy(embedded, asked, new_tokens)
