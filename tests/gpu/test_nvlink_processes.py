"""The `nvlink` transport between processes over symmetric memory: one GPU a rank, or shared."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_afd.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = int(os.environ.get("SEED", random.randrange(2**31)))
ROUNDS = int(os.environ.get("ROUNDS", 10_000))


def launch(
    folder: Path, attention: int, ffn: int, silent: int = -1, whole: tuple[int, ...] = ()
) -> dict[int, str]:
    """What every rank (but a silent one) reports; `whole`: ranks, with the emulated ones."""
    arguments = [str(attention), str(ffn), str(folder), str(SEED), str(silent), *map(str, whole)]
    run_ranks("tests.support.nvlink_world", attention + ffn, arguments, silent)
    ranks = [rank for rank in range(attention + ffn) if rank != silent]
    return {rank: (folder / f"rank{rank}.txt").read_text() for rank in ranks}


def run_ranks(module: str, ranks: int, arguments: list[str], silent: int = -1) -> None:
    """Run a process for every rank; all but a silent one must end well."""
    print(f"SEED={SEED}")
    environment = {
        **os.environ,
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    running = [
        subprocess.Popen([sys.executable, "-m", module, str(rank), *arguments], env=environment)
        for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(running):
            if rank != silent:
                assert process.wait(90) == 0
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_lanes_in_flight_between_processes(tmp_path: Path, lanes: int) -> None:
    """Captured exchanges of several lanes under random delays, in no order between the lanes."""
    arguments = [str(lanes), str(tmp_path), str(SEED), str(ROUNDS)]
    run_ranks("tests.support.nvlink_lanes", 2, arguments)
    assert (tmp_path / "rank0.txt").read_text() == "0"


@pytest.mark.parametrize(("attention", "ffn"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_bit_comes_back(tmp_path: Path, attention: int, ffn: int) -> None:
    assert set(launch(tmp_path, attention, ffn).values()) == {"ok"}


@pytest.mark.parametrize("whole", [(3, 1), (1, 4), (12, 4)], ids=str)
def test_emulated_ranks_disturb_no_real_one(tmp_path: Path, whole: tuple[int, int]) -> None:
    assert set(launch(tmp_path, 1, 1, whole=whole).values()) == {"ok"}


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_stops_is_named(tmp_path: Path, silent: int) -> None:
    """2A1F: the ranks that wait for the silent one end in time and name it."""
    reports = launch(tmp_path, 2, 1, silent)
    topology = Topology(2, 1)
    direct = [2] if silent == 0 else [0, 1]
    for rank in direct:
        assert reports[rank].startswith(f"{topology.name_of(rank)} waited 5 s"), reports
        assert f"for {topology.name_of(silent)} in exchange" in reports[rank]
