"""A holds everything but the experts and F its experts, also at the worst moment of loading."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import FAULT
from tests.support.layouts import A1F1, Layout
from tests.support.world import World

pytestmark = pytest.mark.integration

Start = Callable[..., World]
Checkpoints = Callable[[str], Path]
A1F2 = Layout(1, 2, checkpoint="large")
TOLERANCE = 1.05
FLOAT32 = 4  # bytes


def stored(checkpoint: Path) -> dict[str, int]:
    """Elements of every tensor, from the headers of the checkpoint's files."""
    elements: dict[str, int] = {}
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        elements |= {name: math.prod(tensor["shape"]) for name, tensor in header.items()}
    return elements


def due(checkpoint: Path, ffn_ranks: int) -> list[int]:
    """Parameters that one attention rank and each FFN rank are to hold, by what is stored."""
    attention, experts = 0, dict[int, int]()
    for name, elements in stored(checkpoint).items():
        if match := re.search(r"\.mlp\.experts\.(\d+)\.", name):
            expert = int(match[1])
            experts[expert] = experts.get(expert, 0) + elements
        else:
            attention += elements
    share = len(experts) // ffn_ranks
    assert share * ffn_ranks == len(experts)
    own = [range(rank * share, (rank + 1) * share) for rank in range(ffn_ranks)]
    return [attention, *(sum(experts[expert] for expert in owned) for owned in own)]


def assert_its_own(rank: dict[str, Any], parameters: int, checkpoint: Path) -> None:
    """`rank` holds these parameters, and held hardly more at the worst moment of loading."""
    assert rank["parameters"] == parameters
    own = TOLERANCE * FLOAT32 * parameters
    assert rank["weight_bytes"] <= own, rank
    largest = max(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    peak = rank["load_peak_bytes"]
    assert peak is not None and peak > FLOAT32 * parameters, (
        f"less than the weights cannot be a peak: {rank}"
    )
    assert peak <= own + largest, f"peak of {peak:,}, allowed {own + largest:,.0f}: {rank}"


def held(world: World) -> list[dict[str, Any]]:
    """What the ranks of a world say that they hold."""
    return world.get("/server_info").json()["internal_states"][0]["afd"]["ranks"]


@pytest.mark.parametrize(
    "layout",
    [A1F2, pytest.param(A1F1.of("large"), marks=pytest.mark.full)],
    ids=str,
)
def test_a_role_holds_its_own(start: Start, checkpoints: Checkpoints, layout: Layout) -> None:
    checkpoint = checkpoints("large")
    world = start(layout.argv(str(checkpoint))).wait_healthy()
    for rank, parameters in zip(held(world), due(checkpoint, layout.ffn), strict=True):
        assert_its_own(rank, parameters, checkpoint)


def test_a_rank_that_holds_more_while_loading_is_noticed(
    start: Start, checkpoints: Checkpoints
) -> None:
    """In the end its weights are right: the peak alone tells, on ranks of both roles."""
    checkpoint = checkpoints("large")
    argv = A1F2.argv(str(checkpoint))
    world = start(argv, env={FAULT: "hold_every_tensor"}).wait_healthy()
    for rank, parameters in zip(held(world), due(checkpoint, A1F2.ffn), strict=True):
        with pytest.raises(AssertionError, match=r"^peak of"):
            assert_its_own(rank, parameters, checkpoint)
