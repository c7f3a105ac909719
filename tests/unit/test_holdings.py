"""The report of what every rank holds: its units and its table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.observe.holdings import Holdings, size, table

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
    communicator_bytes=512,
    buffer_bytes=100,
    buffer_estimate_bytes=2048,
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
    communicator_bytes=5 * MIB,
    buffer_bytes=1024,
    buffer_estimate_bytes=1024,
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
        "  KV tokens        KV  communicator  buffers (estimate)",
        "attention rank 0 (world rank 0)              0   1,234,567  3.0 MiB    3.5 MiB"
        "     65,536  2.00 GiB         512 B     100 B (2.0 KiB)",
        "FFN rank 0 (world rank 1)                  128           9      0 B     1023 B"
        "          0       0 B       5.0 MiB   1.0 KiB (1.0 KiB)",
    ]


def test_columns_stay_aligned() -> None:
    lines = table([ATTENTION, FFN, ATTENTION]).splitlines()
    assert len({len(line) for line in lines}) == 1
