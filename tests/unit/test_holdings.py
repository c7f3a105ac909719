"""The report of what every rank holds: its units and its table."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.observe.holdings import Holdings, size, table
from sglang_afd.upstream import holdings as measuring

pytestmark = pytest.mark.unit

MIB = 2**20
ATTENTION = Holdings(
    rank="attention rank 0 (world rank 0)",
    role="attention",
    experts=0,
    parameters=1_234_567,
    weight_bytes=3 * MIB,
    load_peak_bytes=3 * MIB + MIB // 2,
    kv_tokens=65_536,
    kv_bytes=2**31,
    draft_bytes=MIB,
    draft_kv_bytes=2**26,
    communicator_bytes=512,
    buffer_bytes=100,
    buffer_estimate_bytes=2048,
    passing_estimate_bytes=0,
    graph_bytes=0,
)
FFN = Holdings(
    rank="FFN rank 0 (world rank 1)",
    role="ffn",
    experts=128,
    parameters=9,
    weight_bytes=0,
    load_peak_bytes=1023,
    kv_tokens=0,
    kv_bytes=0,
    draft_bytes=0,
    draft_kv_bytes=0,
    communicator_bytes=5 * MIB,
    buffer_bytes=1024,
    buffer_estimate_bytes=1024,
    passing_estimate_bytes=2 * MIB,
    graph_bytes=3 * MIB,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB, "1.0 MiB"),
        (1000 * MIB, "1000.0 MiB"),
        (2**30, "1.00 GiB"),
        (5 * 2**40, "5120.00 GiB"),
    ],
)
def test_sizes_are_in_binary_units(count: int, text: str) -> None:
    assert size(count) == text


@given(st.integers(0, 2**50))
def test_a_size_reads_back_as_what_it_was(count: int) -> None:
    number, unit = size(count).split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    rounding = {"B": 0, "GiB": 0.005}.get(unit, 0.05)
    assert abs(float(number) - count / scale) <= rounding * (1 + 1e-9)


def test_the_table_has_a_line_for_every_rank() -> None:
    assert table([ATTENTION, FFN]).splitlines() == [
        "rank                             experts/layer  parameters  weights  load peak"
        "  KV tokens        KV    draft  draft's KV"
        "  communicator  buffers (estimate)  a round (estimate)   graphs",
        "attention rank 0 (world rank 0)              0   1,234,567  3.0 MiB    3.5 MiB"
        "     65,536  2.00 GiB  1.0 MiB    64.0 MiB"
        "         512 B     100 B (2.0 KiB)                 0 B      0 B",
        "FFN rank 0 (world rank 1)                  128           9      0 B     1023 B"
        "          0       0 B      0 B         0 B"
        "       5.0 MiB   1.0 KiB (1.0 KiB)             2.0 MiB  3.0 MiB",
    ]


def test_columns_stay_aligned() -> None:
    lines = table([ATTENTION, FFN, ATTENTION]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_what_was_not_measured_is_not_a_size() -> None:
    unknown = msgspec.structs.replace(FFN, load_peak_bytes=None)
    assert "0 B  not measured" in table([ATTENTION, unknown]).splitlines()[2]
    assert msgspec.convert(msgspec.to_builtins(unknown), Holdings) == unknown


@dataclass
class Runner:
    is_draft_worker: bool = False


def measured(runner: Runner, loaded: list[Runner]) -> int | None:
    """What the hook measures of a load that holds 256 MiB for a while."""

    def load(one: Runner) -> str:
        loaded.append(one)
        torch.ones(256 * MIB, dtype=torch.uint8)
        return "weights"

    assert measuring._measure_load(load, runner) == "weights"
    return measuring._load_peak


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what earlier tests leave must not be given back while a load is measured
    ctypes.CDLL(None).malloc_trim(0)
    monkeypatch.setattr(measuring, "_load_peak", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_peak_of_loading_is_measured(nothing_measured: None) -> None:
    peak = measured(Runner(), [])
    assert peak is not None and 240 * MIB <= peak < 512 * MIB


@pytest.mark.parametrize("status", [None, "VmRSS: 5 kB\n", ""], ids=["no", "no-peak", "empty"])
def test_a_machine_that_forbids_it_still_starts(
    nothing_measured: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str | None
) -> None:
    """/proc may be read-only, or lack the peak."""
    if status is not None:
        (tmp_path / "status").write_text(status)
        (tmp_path / "clear_refs").touch()
    monkeypatch.setattr(measuring, "_PROC", tmp_path / ("absent" if status is None else ""))
    loaded: list[Runner] = []
    assert measured(Runner(), loaded) is None
    assert len(loaded) == 1


def test_a_draft_models_load_is_not_the_ranks(nothing_measured: None) -> None:
    assert measured(Runner(is_draft_worker=True), []) is None


@pytest.mark.parametrize("told", [(3, 4), 7])
def test_kv_is_counted_whether_values_are_kept_apart_or_not(told: object) -> None:
    assert measuring._kv_bytes(SimpleNamespace(get_kv_size_bytes=lambda: told)) == 7


def test_what_a_draft_shares_with_the_target_is_not_its_own() -> None:
    target, draft = torch.nn.Embedding(8, 4), torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    draft.append(target)
    assert measuring._own_bytes(draft, list(target.parameters())) == 4 * 4 * 4
    assert measuring._own_bytes(draft, []) == 4 * 4 * 4 + 8 * 4 * 4
