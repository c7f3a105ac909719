"""The checkpoints that layouts name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from sglang_afd import embedded
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.drafts import TARGET, seeded_draft
from tests.support.families import ROWS
from tests.support.family_checkpoints import SEED, SHARDS, seeded_family

SEEDED = {
    "seed": 11,
    "layers": 3,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "experts": 8,
    "top_k": 2,
    "shards": 2,
}
LARGE = {
    "seed": 5,
    "layers": 4,
    "hidden": 1024,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 128,
    "experts": 16,
    "top_k": 2,
    "moe_intermediate": 256,
    "shards": 40,
}
"""270 MB, of which 200 are experts, so that the noise of a process's memory is small beside a
role's weights; no file has more than 14 MB."""
_FAMILY: dict[str, Any] = {"seed": SEED, "shards": SHARDS}
_DIMENSIONS: dict[str, dict[str, Any]] = {
    **{"seeded": SEEDED, "zeroed": SEEDED, "large": LARGE, "drafted": TARGET},
    **dict.fromkeys(ROWS, _FAMILY),
}


def directory(name: str, folder: Path) -> Path:
    """The checkpoint `name`, made under `folder` if it is not there yet.

    ``embedded``: the trained model; ``seeded``: random weights, other dimensions, two shards;
    ``zeroed``: the seeded one with all experts zero; ``large``: to measure memory with;
    ``drafted``: random weights, with an EAGLE-3 draft in its directory ``draft``;
    others: those of `tests.support.families`.

    Raises:
        KeyError: no checkpoint has that name.
    """
    if name == "embedded":
        return embedded.path()
    dimensions = _DIMENSIONS[name]
    key = "-".join(f"{k}{v}" for k, v in dimensions.items())
    target = folder / f"{name}-{key}"
    if not target.exists():
        draft = target.with_name(f"{target.name}.{os.getpid()}")
        if name == "zeroed":
            _zeroed(draft, folder)
        elif name in ROWS:
            seeded_family(draft, name, **dimensions)
        else:
            seeded_qwen3_moe(draft, **dimensions)
            if name == "drafted":
                seeded_draft(draft / "draft", draft)
        try:
            draft.rename(target)
        except OSError:  # another process has made it in the meantime
            if not target.exists():
                raise
            shutil.rmtree(draft)
    return target


def _zeroed(target: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = directory("seeded", folder)
    shutil.copytree(source, target)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        tensors = load_file(source / file)
        for tensor_name, tensor in tensors.items():
            if ".mlp.experts." in tensor_name:
                tensor.zero_()
        save_file(tensors, target / file, metadata={"format": "pt"})
