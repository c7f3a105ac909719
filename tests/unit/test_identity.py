"""Checkpoints of the same shapes are told apart, and one at another path is the same."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_afd import embedded
from sglang_afd.config import differences
from sglang_afd.identity import checkpoint_identity

pytestmark = pytest.mark.unit

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
SHARDS = ("model-1.safetensors", "model-2.safetensors")


def shard(tensors: dict[str, bytes]) -> bytes:
    """A safetensors file of byte tensors."""
    header, start = {}, 0
    for name, data in tensors.items():
        end = start + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "one"
    directory.mkdir()
    (directory / CONFIG).write_text("{}")
    (directory / INDEX).write_text('{"weight_map": {}}')
    for number, name in enumerate(SHARDS):
        (directory / name).write_bytes(shard({f"w{number}": bytes(range(256)) * 400, "b": b"12"}))
    return directory


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "elsewhere"))


def differing(here: Path, there: Path) -> list[str]:
    """The fields in which two checkpoints differ."""
    found = differences(checkpoint_identity(str(here)), checkpoint_identity(str(there)))
    return [phrase.partition(" is ")[0] for phrase in found]


def test_the_path_and_other_files_do_not_count(checkpoint: Path, copy: Path) -> None:
    (copy / "README.md").write_text("a copy")
    assert differing(checkpoint, copy) == []


def test_links_into_a_cache_are_the_files_they_name(checkpoint: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in checkpoint.iterdir():
        (linked / file.name).symlink_to(file)
    assert differing(checkpoint, linked) == []


@pytest.mark.parametrize("name", [CONFIG, INDEX])
@pytest.mark.parametrize("change", [lambda f: f.write_text("{ }"), Path.unlink], ids=["new", "no"])
def test_a_changed_description_is_named(
    checkpoint: Path, copy: Path, name: str, change: Callable[[Path], object]
) -> None:
    change(copy / name)
    assert differing(checkpoint, copy) == [name]


def rewrite(tensors: dict[str, bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(shard(tensors))


W = bytes(range(256)) * 400
CHANGES: dict[str, Callable[[Path], object]] = {
    "values": rewrite({"w1": bytes(102400), "b": b"12"}),
    "one-tensor's-name": rewrite({"w9": W, "b": b"12"}),
    "size": rewrite({"w1": W, "b": b"123"}),
    "file-name": lambda file: file.rename(file.with_name("model-3.safetensors")),
    "missing": Path.unlink,
    "half": lambda file: file.write_bytes(file.read_bytes()[:1000]),
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_named(checkpoint: Path, copy: Path, change: str) -> None:
    CHANGES[change](copy / SHARDS[1])
    assert differing(checkpoint, copy) == ["weights"]


def test_other_experts_of_the_same_shapes_are_noticed(tmp_path: Path) -> None:
    """As after another training run: config.json, sizes and headers are equal."""
    from safetensors.torch import load_file, save_file

    other = Path(shutil.copytree(embedded.path(), tmp_path / "other"))
    file = other / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors, file, metadata={"format": "pt"})
    rewritten = Path(shutil.copytree(other, tmp_path / "rewritten"))
    for name in tensors:
        if ".mlp.experts." in name:
            tensors[name] = tensors[name] * 1.01
    save_file(tensors, rewritten / "model.safetensors", metadata={"format": "pt"})
    assert differing(other, rewritten) == ["weights"]


def test_a_hub_repository_is_its_name_and_commit() -> None:
    assert checkpoint_identity("org/name", "abc") == {"checkpoint": "org/name abc"}
    assert checkpoint_identity("org/name") == {"checkpoint": "org/name"}
