"""Compares the recorded MoE layers of two sides and names where an error begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_afd.observe.recording import MAX_POSITION, PARTS, Recordings
from sglang_afd.validation.report import LayerError, Layers
from sglang_afd.validation.thresholds import Thresholds

LONGEST_RECORDED = 512
"""Tokens of the longest prompts that are recorded."""
_MOST_ROWS = MAX_POSITION


class Incomplete(RuntimeError):
    """Recordings that lack a layer or a row, or hold values that are not finite."""


def choose_prompts(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Which prompts to record: the longest of moderate length, or else the shortest of all."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    chosen: list[int] = []
    rows = 0
    for index in order:
        length = len(prompts[index])
        if length <= LONGEST_RECORDED and rows + length <= _MOST_ROWS:
            chosen.append(index)
            rows += length
    return sorted(chosen[:4]) or order[-1:]


def rows_expected(lengths: dict[int, int]) -> set[tuple[int, int]]:
    """(prompt, position) of every row to be compared.

    Args:
        lengths: for each recorded prompt, the tokens that both sides have read in common.
    """
    return {
        (prompt, position)
        for prompt, length in lengths.items()
        for position in range(min(length, MAX_POSITION))
    }


def compare(
    candidate: Path, reference: Path, lengths: dict[int, int], thresholds: Thresholds
) -> Layers:
    """The errors of every MoE layer, and where they begin.

    Args:
        candidate: the folder of its recordings; likewise `reference`.
        lengths: as in `rows_expected`.

    Raises:
        Incomplete: a side lacks a layer or a row, or a value of it is not finite.
    """
    own, other = Recordings(candidate), Recordings(reference)
    rows = sorted(rows_expected(lengths))
    for side, found in (("candidate", own), ("reference", other)):
        missing = set(rows) - found.rows
        if missing or not found.layers:
            raise Incomplete(
                f"the {side} recorded {len(rows) - len(missing)} of {len(rows)} rows in "
                f"{len(found.layers)} MoE layers"
            )
    if own.layers != other.layers:
        raise Incomplete(
            f"the candidate recorded MoE layers {own.layers}, the reference {other.layers}"
        )
    errors = []
    suspects: list[int] | None = None
    for layer in own.layers:
        error, wrong = _layer_error(layer, own, other, rows, thresholds)
        errors.append(error)
        if suspects is None and _is_wrong(error, thresholds):
            suspects = wrong
    return _localised(errors, thresholds, suspects or [])


def _layer_error(
    layer: int,
    own: Recordings,
    other: Recordings,
    rows: list[tuple[int, int]],
    thresholds: Thresholds,
) -> tuple[LayerError, list[int]]:
    """The layer's errors, and the experts that all its wrong rows share."""
    try:
        mine = {part: own.read(layer, part, rows) for part in PARTS}
        theirs = {part: other.read(layer, part, rows) for part in PARTS}
    except ValueError as problem:
        raise Incomplete(str(problem)) from problem
    for side, values in (("candidate", mine), ("reference", theirs)):
        for part in ("input", "output"):
            bad = (~values[part].isfinite().all(dim=1)).sum()
            if bad:
                raise Incomplete(
                    f"the {side}'s {part} of MoE layer {layer} is not finite (NaN or infinite) in "
                    f"{bad} of {len(rows)} rows"
                )
    chosen = mine["experts"].sort(dim=1).values
    same = (chosen == theirs["experts"].sort(dim=1).values).all(dim=1)
    inputs = _relative(mine["input"], theirs["input"])
    outputs = _relative(mine["output"], theirs["output"])
    error = LayerError(
        layer=layer,
        rows=int(same.sum()),
        rerouted=int((~same).sum()),
        input_largest=float(inputs.max()),
        input_p90=float(inputs.quantile(0.9)),
        output_largest=_largest(outputs[same]),
        output_p90=float(outputs[same].quantile(0.9)) if same.any() else 0.0,
    )
    limit = thresholds.layer_largest or thresholds.layer_p90
    wrong = chosen[same & (outputs > limit)].tolist()
    return error, sorted(set.intersection(*map(set, wrong))) if wrong else []


def _relative(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[n]: length of each row's error over the reference row's length.

    Rows far shorter than the others count as long as a tenth of those: their relative rounding
    says nothing.
    """
    values, reference = values.float(), reference.float()
    lengths = reference.norm(dim=1)
    floor = max(float(lengths.square().mean().sqrt()) / 10, 1e-30)
    return (values - reference).norm(dim=1) / lengths.clamp(min=floor)


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def _is_wrong(error: LayerError, thresholds: Thresholds) -> bool:
    nothing_left = error.rerouted > thresholds.rerouted_share * (error.rows + error.rerouted)
    return nothing_left or thresholds.layer_is_wrong(error.output_largest, error.output_p90)


def _localised(errors: list[LayerError], thresholds: Thresholds, suspects: list[int]) -> Layers:
    first = next((i for i, error in enumerate(errors) if _is_wrong(error, thresholds)), None)
    if first is None:
        note = f"all {len(errors)} MoE layers agree"
        return Layers(available=True, note=note, layers=errors)
    wrong = errors[first]
    layer = wrong.layer
    inputs_wrong = thresholds.layer_is_wrong(wrong.input_largest, wrong.input_p90)
    before = errors[first - 1].layer if first else 0
    if inputs_wrong:
        begin = before
        note = (
            f"the error begins in layers {begin} to {layer}, before the experts of layer {layer}: "
            f"their input is wrong already, so look at attention, norms and embedding"
        )
    else:
        begin = layer
        note = (
            f"the error begins in layers {layer} to {layer}: the experts of layer {layer} get the "
            f"right input, and their output is wrong by up to {wrong.output_largest:.2g}"
        )
        if wrong.rerouted > thresholds.rerouted_share * (wrong.rows + wrong.rerouted):
            note += "; the router chose other experts than in the reference"
        elif len(suspects) == 1:
            note += f"; every wrong row went to expert {suspects[0]}"
    return Layers(
        available=True,
        note=note,
        layers=errors,
        first_layer=begin,
        last_layer=layer,
        suspects=suspects,
    )
