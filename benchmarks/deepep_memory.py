"""What DeepEP's low-latency buffers take of a GPU's memory, beside their estimate.

    python -m benchmarks.deepep_memory --out FILE.json [--ranks 2]

Each shape is made by processes of its own, one a rank, with and without NVSHMEM's own NCCL
communicators (``NVSHMEM_DISABLE_NCCL``).  A process's memory is read from NVML before and after
each step, so that ranks that share a GPU are told apart; bytes are as the driver counts them, the
CUDA context apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.progress import say
from sglang_afd.validate import environment

SHAPES = (  # cap T, hidden size, experts
    (128, 2048, 32),
    (128, 2048, 128),
    (256, 2048, 128),
    (128, 4096, 128),
)
BOUND = 120
"""Seconds for one shape."""


def main() -> None:
    """Measure every shape and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    parser.add_argument("--ranks", type=int, default=2, help="processes, a GPU each (%(default)s)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        args.out.write_text(json.dumps(_measure(args.rank, args.ranks, args.meet, *args.shape)))
        return
    runs = []
    identity = environment.describe()
    for shape, disable in itertools.product(SHAPES, ("0", "1")):
        runs.append(_run(shape, args.ranks, disable))
        say(json.dumps(runs[-1])[:600])
        args.out.write_text(json.dumps({"identity": identity, "runs": runs}, indent=1) + "\n")


def _run(shape: tuple[int, int, int], ranks: int, disable_nccl: str) -> dict[str, Any]:
    entry: dict[str, Any] = dict(zip(("cap", "hidden", "experts"), shape, strict=True))
    entry |= {"ranks": ranks, "NVSHMEM_DISABLE_NCCL": disable_nccl}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        commands = [
            [
                *(sys.executable, "-m", "benchmarks.deepep_memory", "--out", str(file)),
                *("--rank", str(rank), "--ranks", str(ranks), "--meet", f"{folder}/meet"),
                *("--shape", *map(str, shape)),
            ]
            for rank, file in enumerate(files)
        ]
        environment = {
            **os.environ, "NVSHMEM_DISABLE_NCCL": disable_nccl, "NCCL_MULTI_RANK_GPU_ENABLE": "1"
        }  # fmt: skip
        running = [subprocess.Popen(command, env=environment) for command in commands]
        try:
            codes = [process.wait(BOUND) for process in running]
        except subprocess.TimeoutExpired:
            return entry | {"failed": f"not done within {BOUND} s"}
        finally:
            for process in running:
                process.kill()
        if any(codes):
            return entry | {"failed": f"exit codes {codes}"}
        return entry | {"measured": [json.loads(file.read_text()) for file in files]}


def _measure(
    rank: int, ranks: int, meet: Path, cap: int, hidden: int, experts: int
) -> dict[str, Any]:
    """Bytes of one rank after each step; the first rank is the attention rank."""
    import torch
    import torch.distributed as dist

    from sglang_afd.dispatch.buffers import Rows, deepep
    from sglang_afd.dispatch.deepep import DeepEpTransport
    from sglang_afd.topology import Topology

    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    at_first = _process_bytes(device)
    dist.init_process_group("nccl", f"file://{meet}", world_size=ranks, rank=rank)
    dist.barrier()
    communicator = _process_bytes(device)
    topology = Topology(ranks - 1, 1)
    transport = DeepEpTransport(
        topology=topology,
        rank=rank,
        num_experts=experts,
        hidden_size=hidden,
        top_k=8,
        cap=cap,
        fp8=False,
        group=dist.group.WORLD,
    )
    torch.cuda.synchronize()
    made = _process_bytes(device)
    del transport
    rows = Rows(experts, hidden, top_k=8, itemsize=2, fp8=False, decode=cap, block=cap)
    estimate = deepep(topology, rows)
    return {
        "context": at_first,
        "communicator": communicator - at_first,
        "transport": made - communicator,
        "estimate": (estimate.ffn if rank == ranks - 1 else estimate.attention).kept,
    }


def _process_bytes(device: int) -> int:
    import pynvml
    import torch

    torch.cuda.synchronize()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(device)
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return int(process.usedGpuMemory)
    raise RuntimeError("NVML does not say how much memory this process uses")


if __name__ == "__main__":
    main()
