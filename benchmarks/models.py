"""Models to measure: published shapes with dummy weights, the embedded model, or a checkpoint.

Dummy weights route tokens nearly evenly and answer nonsense: good for times and memory alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from sglang_afd import embedded

SHAPES = Path(embedded.__file__).parents[1] / "plan" / "models"
EMBEDDED = "embedded"


class NoModel(ValueError):
    """No such model, or one that cannot be changed as asked; the message says so."""


class Model(NamedTuple):
    """A folder that a server can load, and the flags that go with it."""

    folder: Path
    flags: tuple[str, ...]
    vocabulary: int


def prepare(name: str, overrides: dict[str, Any], work: Path) -> Model:
    """The model `name` with fields of its config.json changed.

    Args:
        name: a file of `SHAPES` without ``.json``, ``embedded``, or a checkpoint's folder.
        work: folder for what is written, used again.

    Raises:
        NoModel: there is no such model, or it is a checkpoint, whose fields are fixed.
    """
    shape = SHAPES / f"{name}.json"
    if shape.is_file():
        return _dummy(name, shape, overrides, work)
    folder = embedded.path() if name == EMBEDDED else Path(name)
    if not (folder / "config.json").is_file():
        shapes = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
        raise NoModel(f"model {name} is no folder with a config.json, not {EMBEDDED}, nor {shapes}")
    if overrides:
        raise NoModel(f"overrides: {name} is a checkpoint; only shapes can be changed")
    config = json.loads((folder / "config.json").read_text())
    return Model(folder, (), _vocabulary(config))


def _dummy(name: str, shape: Path, overrides: dict[str, Any], work: Path) -> Model:
    config = json.loads(shape.read_text())
    unknown = sorted(set(overrides) - set(config))
    if unknown:
        raise NoModel(f"overrides: {name} has no {', '.join(unknown)}")
    changes = "".join(f"-{key}={overrides[key]}" for key in sorted(overrides))
    folder = work / f"{name}{changes}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **overrides}))
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder, _vocabulary(config))
    return Model(folder, ("--load-format", "dummy"), _vocabulary(config))


def _vocabulary(config: dict[str, Any]) -> int:
    return int((config.get("text_config") or config)["vocab_size"])


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer whose words are the token ids: bench_serving needs one of the model's size."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", pad_token="w2"
    ).save_pretrained(folder)
