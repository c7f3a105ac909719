"""Recordings of MoE layers: what went into a layer's experts and came out, row by row.

A server that starts with `RECORD_ENV` set writes, for every forward that serves a request whose id
begins with `PREFIX`, one safetensors file into that folder.  Its tensors, for n rows:

* ``request`` [n] int32: the number in the request's id;
* ``position`` [n] int32: the row's place in its sequence;
* ``LAYER.input`` [n, H], ``LAYER.output`` [n, H]: the experts' input and their combined output;
* ``LAYER.experts`` [n, K] int64: the experts that the router chose.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a plugin reads the name of the variable before anything may import PyTorch
    import torch

RECORD_ENV = "SGLANG_AFD_RECORD"
PREFIX = "sglang_afd-record-"
MAX_POSITION = 1024
"""Rows from this position on are not recorded: a row takes 2 H values a layer."""
PARTS = ("input", "output", "experts")


def request_id(number: int, nonce: str) -> str:
    """The id of a request to be recorded under `number`; `nonce` makes it unique."""
    return f"{PREFIX}{number}-{nonce}"


def number_of(request: str) -> int | None:
    """The number in a request's id, or None: it is not to be recorded."""
    if not request.startswith(PREFIX):
        return None
    return int(request.removeprefix(PREFIX).partition("-")[0])


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one file; readers see it whole or not at all."""
    from safetensors.torch import save_file

    draft = folder / f".{name}"
    save_file({key: value.contiguous() for key, value in tensors.items()}, draft)
    os.replace(draft, folder / f"{name}.safetensors")


class Recordings:
    """All files of a folder, seen as one table of rows."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files = sorted(folder.glob("*.safetensors"))
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        layers: set[int] = set()
        for index, file in enumerate(self._files):
            with safe_open(file, framework="pt") as opened:
                numbers = opened.get_tensor("request").tolist()
                positions = opened.get_tensor("position").tolist()
                names = [name.partition(".") for name in opened.keys()]  # noqa: SIM118
            layers |= {int(layer) for layer, dot, _ in names if dot}
            for row, place in enumerate(zip(numbers, positions, strict=True)):
                self._places[place] = index, row
        self.layers = sorted(layers)

    @property
    def rows(self) -> set[tuple[int, int]]:
        """(request number, position) of every row."""
        return set(self._places)

    def read(self, layer: int, part: str, rows: list[tuple[int, int]]) -> torch.Tensor:
        """One layer's ``input``, ``output`` or ``experts`` of `rows`, in their order.

        Raises:
            KeyError: a row was not recorded.
            ValueError: the layer was not recorded in a file that holds one of the rows.
        """
        from safetensors import safe_open

        wanted: dict[int, list[tuple[int, int]]] = {}
        for place, row in enumerate(rows):
            index, at = self._places[row]
            wanted.setdefault(index, []).append((place, at))
        result: torch.Tensor | None = None
        for index, pairs in wanted.items():
            with safe_open(self._files[index], framework="pt") as opened:
                if f"{layer}.{part}" not in opened.keys():  # noqa: SIM118
                    raise ValueError(f"{self._files[index].name} lacks layer {layer}")
                found = opened.get_tensor(f"{layer}.{part}")
            if result is None:
                result = found.new_empty(len(rows), found.shape[1])
            places, taken = zip(*pairs, strict=True)
            result[list(places)] = found[list(taken)].to(result.dtype)
        assert result is not None, "no rows were asked for"
        return result
