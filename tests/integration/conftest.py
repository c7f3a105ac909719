"""Fixtures of the integration tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.layouts import Layout, without_afd
from tests.support.reference import Expect, References
from tests.support.world import World

# What tests start shares the cores with them: two threads wait long for each other's turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    """The layout of the test's shared world."""
    return request.node.callspec.params["world"]


@pytest.fixture
def stock(start: Callable[..., World], layout: Layout, checkpoints: Callable[[str], Path]) -> World:
    """SGLang without AFD, beside the test's world; ask for it once that world does something wrong,
    with ``request.getfixturevalue``, for a start takes long."""
    model = str(checkpoints(layout.checkpoint))
    return start(without_afd(layout).argv(model)).wait_healthy()


@pytest.fixture
def expect(
    request: pytest.FixtureRequest, references: References, checkpoints: Callable[[str], Path]
) -> Expect:
    """What the checkpoint of the test's layout answers: ``expect(prompts, new_tokens)``; that of
    the embedded model, if the test runs on no layout."""
    callspec = getattr(request.node, "callspec", None)
    layout = callspec.params.get("world") if callspec else None
    checkpoint = checkpoints(layout.checkpoint if isinstance(layout, Layout) else "embedded")
    return lambda asked, new_tokens: references.greedy(checkpoint, asked, new_tokens)
