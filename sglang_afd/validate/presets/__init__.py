"""Presets: layouts of published models, each a small JSON file beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

_HERE = Path(__file__).parent


class Preset(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What ``--preset NAME`` stands for; flags on the command line count more."""

    args: list[str]
    """Of the candidate's ``launch_server``, the model among them."""
    reference: str
    reference_args: list[str]
    prompts: str
    new_tokens: int
    status: Literal["run", "unrun"]
    """Whether a record of it is in benchmarks/results."""
    note: str


def names() -> list[str]:
    """Every preset."""
    return sorted(file.stem for file in _HERE.glob("*.json"))


def load(name: str) -> Preset:
    """The preset `name`, which is one of `names`."""
    return msgspec.json.decode((_HERE / f"{name}.json").read_bytes(), type=Preset)
