"""The planner against FastAFD's public figures on GB200; what misses is listed, never tuned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import public_cells as public

pytestmark = pytest.mark.unit

MISSES = {
    f"{public.QWEN} {context}K sweep {nodes}:1 tok/s/GPU"
    for context, ratios in {
        16: (4, 5),
        32: (3, 5, 14, 15),
        64: (3, 5, 8, 15),
        128: (3, 4, 8, 15, 16),
    }.items()
    for nodes in ratios
}
"""Cells outside of their bound: docs/planner.md says why."""
SIGN_MISSES = {(public.MINIMAX, 16384)}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planner.md"


@pytest.mark.parametrize("row", public.rows(), ids=lambda row: row[0])
def test_cell(row: tuple[str, float, float, float]) -> None:
    """Within ±5 % (speed-ups) or ±15 % (throughputs), or a listed miss that still is one."""
    name, predicted, published, allowed = row
    assert (abs(predicted / published - 1) > allowed) == (name in MISSES)


@pytest.mark.parametrize("cell", public.HEADLINES, ids=lambda c: f"{c.model}-{c.context}")
def test_sign_of_the_comparison_with_wide_ep(cell: public.Headline) -> None:
    wrong = (public.over_wide(cell) > 0) != (cell.over_wide > 0)
    assert wrong == ((cell.model, cell.context) in SIGN_MISSES)


def _sweep() -> dict[int, float]:
    return {nodes: public.swept(16384, nodes) for nodes in range(1, 17)}


def test_16k_sweep_has_one_peak_and_falls_to_16() -> None:
    found = _sweep()
    peak = max(found, key=found.__getitem__)
    assert 4 < peak < 16
    values = list(found.values())
    assert values[:peak] == sorted(values[:peak])
    assert values[peak - 1 :] == sorted(values[peak - 1 :], reverse=True)


@pytest.mark.xfail(strict=True, reason="FFN ranks hide up to 13:1 at the headline's batch")
def test_16k_sweep_peaks_near_5() -> None:
    """docs/planner.md tells why the published cells at 4:1 and 5:1 are out of reach."""
    found = _sweep()
    assert 4 <= max(found, key=found.__getitem__) <= 7


def test_wide_ep_has_its_best_width_and_falls() -> None:
    found = public.predicted_wide(public.QWEN, 8192)
    assert max(found, key=found.__getitem__) == 16
    assert found[64] < found[32] < found[16]


def test_document_lists_every_cell() -> None:
    """The table there is this code's; regenerate it with `tests.support.public_cells.table`."""
    assert public.table() in DOCUMENT.read_text()
