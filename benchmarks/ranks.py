"""Two processes of a benchmark, one attention and one FFN rank with a GPU each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_pair(module: str, *arguments: str, seconds: float) -> Any:
    """Run ``python -m module ARGUMENTS --rank R --meet FILE --out FILE`` as ranks 0 and 1.

    Returns:
        what rank 0 wrote as JSON, or ``{"failed": why}``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            *(sys.executable, "-m", module, "--out", str(out), *arguments),
            *("--meet", f"{folder}/meet", "--rank"),
        ]
        running = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        deadline = time.monotonic() + seconds
        try:
            codes = [process.wait(max(1, deadline - time.monotonic())) for process in running]
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {seconds} s"}
        finally:
            for process in running:
                process.kill()
        return {"failed": f"exit codes {codes}"} if any(codes) else json.loads(out.read_text())


def as_rank(rank: int, meet: str, measure: Callable[[], Any], out: Path) -> None:
    """Join the other process, measure, write rank 0's result, and end this process."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        f"file://{meet}",
        world_size=2,
        rank=rank,
        device_id=torch.device("cuda", rank),
    )
    result = measure()
    if rank == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # DeepEP's and NVSHMEM's own ends are not what is measured
