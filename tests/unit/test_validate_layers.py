"""Recorded MoE layers: read row by row, compared, and the layer of an error named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_afd.observe.recording import (
    MAX_POSITION,
    Recordings,
    number_of,
    request_id,
    write,
)
from sglang_afd.validate.layers import Incomplete, choose_prompts, compare, rows_expected
from sglang_afd.validation.report import Layers
from sglang_afd.validation.thresholds import THRESHOLDS

pytestmark = pytest.mark.unit

LAYERS, HIDDEN, EXPERTS = 4, 16, 6
LENGTHS = {2: 30, 5: 10}
LIMITS = THRESHOLDS["float32"]
Change = Callable[[int, dict[str, torch.Tensor]], None]


def record(folder: Path, change: Change = lambda layer, tensors: None, files: int = 3) -> Path:
    """A side's recordings: 40 rows in `files` files; `change` spoils one layer's tensors."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(1)
    rows = [(number, place) for number, length in LENGTHS.items() for place in range(length)]
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        made = {
            "input": torch.randn(len(rows), HIDDEN, generator=draw),
            "output": torch.randn(len(rows), HIDDEN, generator=draw),
            "experts": torch.stack([torch.randperm(EXPERTS, generator=draw)[:2] for _ in rows]),
        }
        change(layer, made)
        tensors |= {f"{layer}.{part}": value for part, value in made.items()}
    tensors["request"] = torch.tensor([number for number, _ in rows], dtype=torch.int32)
    tensors["position"] = torch.tensor([place for _, place in rows], dtype=torch.int32)
    for file in range(files):
        write(folder, f"rank0-{file}", {name: t[file::files] for name, t in tensors.items()})
    return folder


def compared(tmp_path: Path, change: Change) -> Layers:
    return compare(record(tmp_path / "own", change), record(tmp_path / "other"), LENGTHS, LIMITS)


def of_layer(wanted: int, spoil: Callable[[dict[str, torch.Tensor]], None]) -> Change:
    return lambda layer, tensors: spoil(tensors) if layer == wanted else None


def scale(part: str, by: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[part] *= by

    return spoil


def test_equal_recordings_agree_however_they_are_cut(tmp_path: Path) -> None:
    own, other = record(tmp_path / "own", files=1), record(tmp_path / "other", files=5)
    found = compare(own, other, LENGTHS, LIMITS)
    assert found.available and found.first_layer is found.last_layer is None
    assert [error.layer for error in found.layers] == [0, 1, 2, 3]
    assert all(error.rows == 40 and error.output_largest == 0 for error in found.layers)


def test_a_wrong_output_names_its_layer(tmp_path: Path) -> None:
    def change(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        if layer >= 1:
            tensors["output"] *= 1.01
        if layer > 1:
            tensors["input"] *= 1.01  # what follows carries the error on

    found = compared(tmp_path, change)
    assert (found.first_layer, found.last_layer) == (1, 1)
    assert "layers 1 to 1" in found.note and "right input" in found.note


def test_a_wrong_input_names_the_layers_between(tmp_path: Path) -> None:
    def change(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        if layer >= 2:
            tensors["input"] *= 1.01
            tensors["output"] *= 1.01

    found = compared(tmp_path, change)
    assert (found.first_layer, found.last_layer) == (1, 2)
    assert "layers 1 to 2, before the experts" in found.note


def test_the_expert_that_all_wrong_rows_share_is_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["output"][(tensors["experts"] == 3).any(dim=1)] *= 1.001

    found = compared(tmp_path, of_layer(2, spoil))
    assert found.suspects == [3] and found.note.endswith("went to expert 3")


def test_the_order_of_a_rows_experts_does_not_count(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["experts"] = tensors["experts"].flip(1)

    assert compared(tmp_path, of_layer(2, spoil)).last_layer is None


def test_a_router_that_chooses_other_experts_is_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["experts"] = (tensors["experts"] + 1) % EXPERTS

    found = compared(tmp_path, of_layer(2, spoil))
    assert found.last_layer == 2 and "the router chose other experts" in found.note
    assert found.layers[2].rerouted > 30


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["input", "output"])
def test_one_value_that_is_not_finite_is_no_comparison(
    tmp_path: Path, part: str, value: float
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[part][7, 3] = value

    with pytest.raises(Incomplete, match=f"candidate's {part} of MoE layer 3 .* 1 of 40 rows"):
        compared(tmp_path, of_layer(3, spoil))


def test_a_missing_row_is_no_comparison(tmp_path: Path) -> None:
    own, other = record(tmp_path / "own"), record(tmp_path / "other")
    (own / "rank0-1.safetensors").unlink()
    with pytest.raises(Incomplete, match="the candidate recorded 27 of 40 rows"):
        compare(own, other, LENGTHS, LIMITS)


def test_a_missing_layer_is_no_comparison(tmp_path: Path) -> None:
    def change(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        if layer == 3:
            tensors.clear()

    with pytest.raises(Incomplete, match=r"layers \[0, 1, 2\], the reference \[0, 1, 2, 3\]"):
        compared(tmp_path, change)


def test_nothing_recorded_is_no_comparison(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with pytest.raises(Incomplete, match="the candidate recorded 0 of 40 rows"):
        compare(tmp_path / "own", record(tmp_path / "other"), LENGTHS, LIMITS)


def test_rows_after_a_divergence_are_not_asked_for(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["output"][29] += 5  # the last row of request 2

    own = record(tmp_path / "own", of_layer(0, spoil))
    other = record(tmp_path / "other")
    assert compare(own, other, {2: 29, 5: 10}, LIMITS).last_layer is None
    assert compare(own, other, LENGTHS, LIMITS).last_layer == 0


def test_half_written_files_are_not_read(tmp_path: Path) -> None:
    folder = record(tmp_path / "own")
    (folder / ".rank0-9").write_bytes(b"half")
    assert len(Recordings(folder).rows) == 40


def test_ids_carry_the_number() -> None:
    assert number_of(request_id(17, "ab-cd")) == 17
    assert number_of("cmpl-17") is None


def test_long_prompts_are_recorded_up_to_a_bound() -> None:
    assert len(rows_expected({0: 5000})) == MAX_POSITION


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([3, 500, 10, 400, 2000], [0, 1, 2, 3]),
        ([9000, 3000, 5000], [1]),
        ([500, 500, 500, 20], [0, 1, 3]),
        ([1] * 9, [0, 1, 2, 3]),
    ],
)
def test_which_prompts_are_recorded(lengths: list[int], chosen: list[int]) -> None:
    assert choose_prompts([[0] * n for n in lengths]) == chosen
