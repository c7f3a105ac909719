"""/update_weights_from_disk: both roles' halves of the model change, or neither does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.layouts import A1T2F1, A2F1, A2F2, CAD, lanes, small
from tests.support.reference import References, assert_equal
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

NEW_TOKENS = 12
LANES = lanes(replace(small(A2F1), checkpoint="seeded"), 2)
SEEDED = replace(small(A2F1), checkpoint="seeded")
WIDER = tuple(replace(small(layout), checkpoint="seeded") for layout in (A2F2, A1T2F1))
INDEX = "model.safetensors.index.json"

Same = Callable[[Path], None]


def changed(source: Path, target: Path, change: Callable[[str, Any], Any]) -> Path:
    """A copy of `source` where a tensor is ``change(name, tensor)``; None leaves it out."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})
    return target


@pytest.fixture
def seeded(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("seeded")


@pytest.fixture
def same(world: World, references: References) -> Same:
    """``same(checkpoint)``: the server answers as that one does, on every attention rank."""

    def check(checkpoint: Path) -> None:
        asked = prompts([5, 40, 20, 9], seed=71)
        assert_equal(
            send(world, asked, [NEW_TOKENS] * 4), references.greedy(checkpoint, asked, NEW_TOKENS)
        )

    return check


def update(world: World, path: Path, **fields: Any) -> Any:
    return world.post("/update_weights_from_disk", {"model_path": str(path), **fields})


@pytest.fixture(autouse=True)
def first_weights(world: World, seeded: Path) -> Iterator[None]:
    """Leave the shared world as it was."""
    yield
    assert update(world, seeded).status_code == 200


def layouts(*wider: Any, also: tuple[Any, ...] = ()) -> pytest.MarkDecorator:
    full = [pytest.param(layout, marks=pytest.mark.full) for layout in wider]
    return pytest.mark.parametrize("world", [SEEDED, *also, *full], indirect=True, ids=str)


@layouts(*WIDER, LANES, also=(CAD.of("seeded"),))
def test_update_from_disk(world: World, seeded: Path, same: Same, tmp_path: Path) -> None:
    """F's tensors alone, A's alone, then both: each time the answers are the new model's."""
    same(seeded)
    experts = changed(seeded, tmp_path / "f", lambda n, t: -t if ".experts." in n else t)
    rest = changed(seeded, tmp_path / "a", lambda n, t: t if ".experts." in n else t * 1.25)
    for checkpoint in (experts, rest, seeded):
        answer = update(world, checkpoint, weight_version=checkpoint.name)
        assert answer.status_code == 200, answer.text
        same(checkpoint)
        assert world.get("/model_info").json()["model_path"] == str(checkpoint)


@layouts(LANES)
@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_update_while_paused(
    world: World, seeded: Path, same: Same, tmp_path: Path, mode: str
) -> None:
    """As a trainer does it: pause, update, continue; requests that were retracted go on."""
    checkpoint = changed(seeded, tmp_path / "new", lambda n, t: -t if ".experts." in n else t)
    [asked] = prompts([20], seed=75)
    stream = world.stream(asked, 200)
    next(stream)
    assert world.post("/pause_generation", {"mode": mode}).status_code == 200
    answer = update(world, checkpoint)
    assert answer.status_code == 200, answer.text
    assert world.post("/continue_generation", {}).status_code == 200
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    same(checkpoint)


@layouts()
def test_checkpoints_that_no_rank_reads(
    world: World, seeded: Path, same: Same, tmp_path: Path
) -> None:
    """Nothing is there, something is missing, another model: a 400 that says so."""
    lacking = changed(
        seeded, tmp_path / "lacking", lambda n, t: None if ".1.mlp.experts.3.up" in n else t
    )
    other = changed(seeded, tmp_path / "other", lambda n, t: t)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    for path, fields, why in (
        (tmp_path / "nowhere", {}, "there is no directory"),
        (lacking, {}, "lacks 1 of the tensors that its config.json implies"),
        (other, {}, "its config.json differs in rope_theta"),
        (seeded, {"load_format": "dummy"}, "load format dummy"),
        (seeded, {"recapture_cuda_graph": True}, "leave recapture_cuda_graph out"),
    ):
        answer = update(world, path, **fields)
        assert answer.status_code == 400 and why in answer.text, answer.text
        assert "AFD refuses /update_weights_from_disk" in answer.text
    same(seeded)


@layouts(*WIDER)
@pytest.mark.parametrize("role", ["attention", "FFN"])
def test_a_rank_that_cannot_read_takes_every_rank_back(
    world: World, seeded: Path, same: Same, tmp_path: Path, role: str
) -> None:
    """Data that only one role's loader trips over, after the other has read its own."""
    tensor = "layers.1.mlp.experts.3.up_proj" if role == "FFN" else "embed_tokens"
    broken = changed(seeded, tmp_path / "broken", lambda n, t: t)
    add_wrong_twin(broken, tensor)
    answer = update(world, broken)
    assert answer.status_code == 400
    assert f"{role} rank 0" in answer.text and "again" in answer.text, answer.text
    same(seeded)


def add_wrong_twin(checkpoint: Path, part: str) -> None:
    """Add a file with a second tensor of the name that has `part` in it, of a wrong shape.

    Headers are read in the files' order, and the last tensor of a name counts there.
    """
    index = json.loads((checkpoint / INDEX).read_text())
    [name] = [name for name in index["weight_map"] if part in name]
    first = "model-00000-of-00000.safetensors"
    save_file({name: torch.ones(3, 3), "unread": torch.ones(1)}, checkpoint / first)
    index["weight_map"]["unread"] = first
    (checkpoint / INDEX).write_text(json.dumps(index))
