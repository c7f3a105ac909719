"""The headers of a checkpoint's safetensors files: what tensors it has, without reading any.

A header is a JSON object at the file's beginning; even 100 files are read in a second or so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from sglang_afd.facts import Refusal
from sglang_afd.families import ExpertTensor, Family, Shape

FP8_BLOCK = 128
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_LONGEST_HEADER = 100 << 20  # safetensors' own limit
_PLAIN = ("BF16", "F16", "F32")
_FP8 = "F8_E4M3"
_SCALE = "_scale_inv"
_DOWNLOAD = "download it again, whole"
_COMPLETE = "give --model-path a complete checkpoint, with the config.json that belongs to it"


class BrokenFile(ValueError):
    """A file that is no whole safetensors file; the message is ``what; mend``."""


class Stored(NamedTuple):
    """A tensor as a header describes it: where, its type as safetensors names it, its shape."""

    file: str
    dtype: str
    shape: Shape


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of all `files`, by name.

    Raises:
        BrokenFile: a file cannot be read, is cut short, or is no safetensors file.
    """
    return {name: tensor for file in files for name, tensor in _header(file)}


def refusals(
    tensors: Mapping[str, Stored], expected: Iterable[tuple[str, Shape]], family: Family, fp8: bool
) -> Iterator[Refusal]:
    """What of the `expected` tensors is missing, or not as it should be: one refusal a kind.

    Args:
        fp8: the experts are quantised to FP8, with a scale for each block.
    """
    tensors = dict(_one_by_one(tensors, family))
    missing: list[str] = []
    shapes: list[str] = []
    types: list[str] = []
    for name, shape in expected:
        found = tensors.get(name)
        if found is None:
            missing.append(name)
            continue
        if found.shape != shape:
            shapes.append(f"{name} is {text(found.shape)} in {found.file}, not {text(shape)}")
        if found.dtype == _FP8 and fp8:
            scale, blocks = tensors.get(name + _SCALE), tuple(-(-n // FP8_BLOCK) for n in shape)
            if scale is None:
                missing.append(name + _SCALE)
            elif scale.shape != blocks:
                shapes.append(f"{name}{_SCALE} is {text(scale.shape)}, not {text(blocks)}")
        elif found.dtype not in _PLAIN or (fp8 and family.expert_tensor(name) is not None):
            types.append(f"{name} is {found.dtype} in {found.file}")
    if missing:
        yield Refusal(
            f"the checkpoint lacks {len(missing)} of the tensors that its config.json implies, "
            f"first {missing[0]}",
            _COMPLETE,
        )
    if shapes:
        yield Refusal(
            f"the shapes of {len(shapes)} of the tensors are not what config.json implies, first "
            f"{shapes[0]}",
            _COMPLETE,
        )
    if types:
        served = f"experts in {_FP8} with their scales" if fp8 else ", ".join(_PLAIN)
        yield Refusal(
            f"the types of {len(types)} of the tensors are not served, first {types[0]}",
            f"use a checkpoint with {served}",
        )


def _one_by_one(tensors: Mapping[str, Stored], family: Family) -> Iterator[tuple[str, Stored]]:
    """The tensors, with one for each expert in place of those of a layer's experts."""
    for name, stored in tensors.items():
        fused = family.experts.read_fused(name)
        if fused is None or len(stored.shape) != 3:
            yield name, stored
            continue
        experts, rows, columns = stored.shape
        part = stored._replace(shape=(rows // len(fused.projections), columns))
        for expert, projection in product(range(experts), fused.projections):
            yield (
                family.experts.spell(ExpertTensor(fused.layer, expert, projection, "weight")),
                part,
            )


def text(shape: Shape) -> str:
    """A shape for people."""
    return "x".join(map(str, shape)) or "a single number"


def _header(file: Path) -> Iterator[tuple[str, Stored]]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LONGEST_HEADER):
                raise BrokenFile(
                    f"{file} ({size} bytes) is cut short, or is no safetensors file; {_DOWNLOAD}"
                )
            header = json.loads(opened.read(length))
        found = [
            (name, Stored(file.name, entry["dtype"], tuple(entry["shape"])))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        ends = (entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__")
        whole = _LENGTH_BYTES + length + max(ends, default=0)
    except BrokenFile:
        raise
    except OSError as error:
        raise BrokenFile(f"{file} cannot be read: {error.strerror or error}; check it") from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise BrokenFile(f"{file} has a broken safetensors header; {_DOWNLOAD}") from error
    if size != whole:
        raise BrokenFile(f"{file} has {size} bytes, its header tells of {whole}; {_DOWNLOAD}")
    yield from found
