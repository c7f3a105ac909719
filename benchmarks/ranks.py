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
        what rank 0 wrote as JSON, or ``{"failed": why}``, with the last line of each rank's errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            *(sys.executable, "-m", module, "--out", str(out), *arguments),
            *("--meet", f"{folder}/meet", "--rank"),
        ]
        errors = [Path(folder) / f"errors{rank}" for rank in range(2)]
        running = []
        for rank, file in enumerate(errors):
            with file.open("w") as stream:
                running.append(subprocess.Popen([*command, str(rank)], stderr=stream))
        deadline = time.monotonic() + seconds
        failed = ""
        try:
            codes = [process.wait(max(1, deadline - time.monotonic())) for process in running]
            failed = f"exit codes {codes}" if any(codes) else ""
        except subprocess.TimeoutExpired:
            failed = f"not done within {seconds} s"
        finally:
            for process in running:
                process.kill()
                process.wait()
        texts = [file.read_text(errors="replace") for file in errors]
        sys.stderr.write("".join(texts))
        if not failed:
            return json.loads(out.read_text())
        said = [(text.strip().splitlines() or ["nothing"])[-1] for text in texts]
        return {"failed": f"{failed}; rank 0: {said[0]}; rank 1: {said[1]}"}


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
