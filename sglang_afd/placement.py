"""Which expert each slot of the FFN ranks holds.

Every F rank has as many slots in a layer as the others, one expert in each.  Without replicas slot
e holds expert e; with them there are more slots than experts, so that a busy expert has several, on
several ranks, among which its rows are shared out.  Transports know slots alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

MAP, COUNT = "physical_to_logical_map", "logical_count"
"""What a file may hold, in the form of SGLang's --init-expert-location: for every decoder layer
the expert of each slot, or the rows that each expert got."""
Table = list[list[int]]
_Number = Annotated[int, msgspec.Meta(ge=0)]


class PlacementError(ValueError):
    """A placement that cannot be right; the message says why, and what to do."""


@dataclass(frozen=True)
class Placement:
    """The expert in each slot, for every MoE layer."""

    experts: int
    layers: dict[int, tuple[int, ...]]
    """By the index of the decoder layer."""

    def slots_of(self, layer: int) -> list[list[int]]:
        """The slots of each expert, at least one."""
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for slot, expert in enumerate(self.layers[layer]):
            found[expert].append(slot)
        return found


def in_order(layers: Sequence[int], experts: int, replicas: int) -> Placement:
    """Every expert once in order, then the first ones again."""
    row = tuple(slot % experts for slot in range(experts + replicas))
    return Placement(experts, dict.fromkeys(layers, row))


def read(
    file: str,
    layers: Sequence[int],
    experts: int,
    replicas: int,
    spread: Callable[[Table], Table] | None,
) -> Placement:
    """The placement that `file` describes; arguments and errors are those of `fitting`."""
    source = f"--afd-expert-placement {file}"
    try:
        content = json.loads(Path(file).read_text())
    except OSError as error:
        raise PlacementError(f"{source}: {error.strerror}; give a file") from error
    except ValueError as error:
        raise PlacementError(f"{source} is no JSON: {error}; correct it") from error
    return fitting(content, source, layers, experts, replicas, spread)


def fitting(
    content: Any,
    source: str,
    layers: Sequence[int],
    experts: int,
    replicas: int,
    spread: Callable[[Table], Table] | None,
) -> Placement:
    """The placement that `content`, decoded JSON, describes.

    Args:
        source: what messages call it.
        layers: the MoE layers, by the index of the decoder layer.
        spread: counts of every MoE layer's experts -> the expert in each slot; None: counts are
            looked at, and the experts placed in order.

    Raises:
        PlacementError: it describes none that fits.
    """
    kind, rows = _table(content, source)
    wanted = experts + replicas if kind == MAP else experts
    if len(rows) <= max(layers):
        raise PlacementError(
            f"{source}: {kind} has {len(rows)} rows, not one for each decoder layer up to "
            f"{max(layers)}; write one with python -m sglang_afd.trace --expert-counts"
        )
    chosen = [rows[layer] for layer in layers]
    for layer, row in zip(layers, chosen, strict=True):
        if len(row) != wanted:
            raise PlacementError(
                f"{source}: {kind} of layer {layer} has {len(row)} numbers, not {wanted}, for "
                f"{experts} experts and {replicas} replicas (--afd-expert-replicas); correct either"
            )
    if kind == COUNT:
        if spread is None:
            return in_order(layers, experts, replicas)
        chosen = spread(chosen)
    for layer, row in zip(layers, chosen, strict=True):
        if set(row) != set(range(experts)):
            raise PlacementError(
                f"{source}: {kind} of layer {layer} leaves an expert out or names one that is "
                f"none; each of 0 to {experts - 1} needs a slot"
            )
    return Placement(experts, dict(zip(layers, map(tuple, chosen), strict=True)))


def _table(content: Any, source: str) -> tuple[str, Table]:
    """What kind of table it is, and its rows; counts of several steps are added up."""
    for kind in (MAP, COUNT):
        if isinstance(content, dict) and kind in content:
            rows = _rows(content[kind], several=kind == COUNT)
            if rows is None:
                raise PlacementError(
                    f"{source}: {kind} is no list of lists of whole numbers; correct it"
                )
            return kind, rows
    raise PlacementError(f"{source} has neither {MAP} nor {COUNT}; give one of the two")


def _rows(value: Any, *, several: bool) -> Table | None:
    """The rows, in sum over the steps if there may be `several`; None: it is no such table."""
    try:
        return msgspec.convert(value, list[list[_Number]])
    except msgspec.ValidationError:
        if not several:
            return None
    try:
        steps = msgspec.convert(value, list[list[list[_Number]]])
        return [
            [sum(counts) for counts in zip(*layer, strict=True)]
            for layer in zip(*steps, strict=True)
        ]
    except ValueError:  # msgspec's is one, too
        return None
