"""What a checkpoint's directory says of it, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_afd.command_line import last_value
from sglang_afd.families import Family, MoeFacts, UnsupportedModel, family_of
from sglang_afd.model_fields import Fields, wrong_field

_INDEX = "model.safetensors.index.json"
_CHECK_PATH = "check --model-path"
_COMPLETE = "give --model-path the directory of a complete checkpoint"
_OVERRIDES = "--json-model-override-args"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its config.json (overrides applied) and the names of its files."""

    path: str
    config: Mapping[str, Any] | None = None
    """None: it cannot be read, and `problem` says why."""
    problem: str = ""
    mend: str = ""
    files: frozenset[str] | None = None
    """None: the files are not on this machine (yet)."""
    shards: frozenset[str] = field(default=frozenset())
    """The files that the checkpoint's index names."""

    @property
    def architecture(self) -> str:
        """``architectures[0]``.

        Raises:
            UnsupportedModel: there is none.
        """
        names = (self.config or {}).get("architectures")
        if not names:
            raise UnsupportedModel("config.json names no architecture; give a complete checkpoint")
        return str(names[0])

    @property
    def family(self) -> Family:
        """The family that serves the checkpoint.

        Raises:
            UnsupportedModel: none does.
        """
        return family_of(self.architecture)

    @property
    def text_config(self) -> Fields:
        """The configuration of the language model."""
        config = self.config or {}
        return Fields(config.get("text_config") or config)

    def weight_files(self) -> list[Path]:
        """The safetensors files that SGLang reads: those of the index, or all without one."""
        names = self.shards or {n for n in self.files or () if n.endswith(".safetensors")}
        return [Path(self.path, name) for name in sorted(names)]

    def moe_facts(self) -> MoeFacts:
        """The facts of the routed experts.

        Raises:
            UnsupportedModel: no family serves the checkpoint, or config.json is incomplete.
        """
        return self.family.facts(self.text_config)


def read_checkpoint(args: Sequence[str]) -> Checkpoint:
    """Read what SGLang's arguments `args` name as the model.

    A name that is no directory is looked up on the Hugging Face Hub, as SGLang does; of such a
    checkpoint only config.json is fetched.
    """
    path = last_value(args, "--model-path", "--model") or ""
    try:
        return _read(path, args)
    except (OSError, ValueError) as error:  # a path that no file system takes, or may not be read
        return Checkpoint(path, problem=f"{path} cannot be read: {error}", mend=_CHECK_PATH)


def _read(path: str, args: Sequence[str]) -> Checkpoint:
    directory = Path(path)
    if directory.is_dir():
        file = directory / "config.json"
        files = frozenset(entry.name for entry in directory.iterdir())
    elif directory.exists():
        return Checkpoint(
            path,
            problem=f"{path} is a file",
            mend="give --model-path the directory of a checkpoint in the Hugging Face layout",
        )
    else:
        try:
            file, files = _from_hub(path, last_value(args, "--revision")), None
        except ValueError as error:
            return Checkpoint(path, problem=str(error), mend=_CHECK_PATH)
    try:
        overrides = _overrides(args)
    except ValueError as error:
        return Checkpoint(path, problem=str(error), mend="correct it", files=files)
    try:
        config = {**_json_object(file), **overrides}
        shards = _shards(directory / _INDEX)
    except ValueError as error:
        return Checkpoint(path, problem=str(error), mend=_COMPLETE, files=files)
    if problem := wrong_field(config):
        what, _, mend = f"config.json: {problem}".partition("; ")
        mend += f" (config.json or {_OVERRIDES} says it)" if overrides else ""
        return Checkpoint(path, problem=what, mend=mend, files=files)
    return Checkpoint(path, config, files=files, shards=shards)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no {file}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


def _overrides(args: Sequence[str]) -> dict[str, Any]:
    text = last_value(args, _OVERRIDES) or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{_OVERRIDES} is no JSON object: {text}")
    return found


def _shards(index: Path) -> frozenset[str]:
    if not index.exists():
        return frozenset()
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise ValueError(f"{index} has no weight_map of tensors to files")
    return frozenset(weight_map.values())


def _from_hub(name: str, revision: str | None) -> Path:
    """config.json of a Hub repository, out of the local cache or fetched.

    Raises:
        ValueError: `name` is neither a directory nor a repository that can be reached.
    """
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no directory {name!r}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # warnings of its retries would hide the one message that counts
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # its errors come from several libraries
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{name} is neither a directory nor a checkpoint that can be fetched from the Hugging "
            f"Face Hub ({reason})"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
