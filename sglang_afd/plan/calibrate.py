"""``python -m sglang_afd.plan calibrate``: measure this machine's GPUs, save a profile.

Each kernel kind is measured by a CUDA graph of many launches, as a decode step runs them; what is
not measured keeps the base profile's figure, and its source says so.  torch is imported here only.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_afd.plan import profile as profiles
from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.profile import GpuProfile

_LAUNCHES = 50
_REPEATS = 5
_DEVICE = "cuda:0"
_COPIED = 2**30
"""Bytes of a copy: far more than any cache."""
_ROWS, _MANY_ROWS, _CONTEXT = 64, 8192, 8192
_HIDDEN, _INTERMEDIATE, _EXPERTS = 4096, 1536, 32
_PEER_TIMEOUT = 120.0


class Measured(NamedTuple):
    """One figure, and how it was measured."""

    value: float
    how: str


def main(argv: Sequence[str]) -> int:
    """Measure, write the profile, print what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_afd.plan calibrate",
        description="Measure the present GPUs (copies, dense and grouped GEMMs, decode attention, "
        "small kernels; with two GPUs, peer bandwidth and latency too) and save a profile for "
        "--gpu. Takes a minute; nothing else should run on the GPUs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu.json"), help="the profile (default: %(default)s)"
    )
    parser.add_argument(
        "--base",
        default="h200",
        metavar="NAME",
        help="the profile whose datasheet figures and unmeasured values are kept: "
        f"{', '.join(profiles.shipped())} (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if not args.out.parent.is_dir():
        raise PlanError("--out", f"there is no directory {args.out.parent}")
    base = profiles.read_profile(args.base)
    torch = _torch()
    device = torch.cuda.get_device_properties(0)
    found = _one_gpu(torch, base)
    if torch.cuda.device_count() > 1:
        found |= _two_gpus(torch, base)
    profile = merged(base, found, name=device.name, memory=float(device.total_memory))
    profiles.write_profile(profile, args.out)
    for field in sorted(found):
        print(f"{field:<24} {found[field].value:.4g}  {found[field].how}")
    print(f"wrote {args.out}")
    return 0


def merged(base: GpuProfile, found: dict[str, Measured], *, name: str, memory: float) -> GpuProfile:
    """`base` with the measured figures in its place.

    Raises:
        PlanError: a measured figure cannot be right.
    """
    sources = {field: f"{base.name}'s: {source}" for field, source in base.sources.items()}
    sources |= {field: f"measured: {one.how}" for field, one in found.items()}
    sources["memory"] = "reported by the driver"
    values: dict[str, Any] = {field: one.value for field, one in found.items()}
    profile = dataclasses.replace(
        base, name=name, memory=memory, measured=True, sources=sources, **values
    )
    content = {
        "name": name,
        "measured": True,
        "figures": {f: [getattr(profile, f), s] for f, s in sources.items()},
    }
    return profiles.profile_of(content)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise PlanError("calibrate", "needs torch, which is not installed") from None
    if not torch.cuda.is_available():
        raise PlanError(
            "calibrate",
            "there is no CUDA GPU here; run it on the machine with the GPUs and copy the profile, "
            f"or plan with one of {', '.join(profiles.shipped())}",
        )
    return torch


def _one_gpu(torch: Any, base: GpuProfile) -> dict[str, Measured]:
    return {
        "bandwidth": _copies(torch, base),
        "kernel_seconds": _small(torch),
        "gemm_efficiency": _dense(torch, base),
        "math_efficiency": _math(torch, base),
        "grouped_efficiency": _grouped(torch, base),
        "attention_efficiency": _attention(torch, base),
    }


def _random(torch: Any, *size: int) -> Any:
    return torch.randn(*size, device=_DEVICE, dtype=torch.bfloat16)


def _copies(torch: Any, base: GpuProfile) -> Measured:
    source = torch.empty(_COPIED, device=_DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    rate = 2 * source.numel() / _timed(torch, lambda: target.copy_(source), launches=8)
    # efficiencies are shares of the datasheet's peak, which stays what they are measured against
    return Measured(base.bandwidth, f"{base.name}'s peak; copies reach {rate / 1e12:.2f} TB/s")


def _small(torch: Any) -> Measured:
    vector = torch.zeros(_ROWS, device=_DEVICE)
    seconds = _timed(torch, lambda: vector.add_(1.0))
    return Measured(seconds, "an addition of 64 elements in a CUDA graph")


def _dense(torch: Any, base: GpuProfile) -> Measured:
    rows = _random(torch, _ROWS, _HIDDEN)
    weights = [_random(torch, _HIDDEN, 2 * _HIDDEN) for _ in range(8)]
    seconds = _timed(torch, _rotating(weights, lambda weight: rows @ weight))
    read = weights[0].numel() * 2 / seconds
    return _share(read / base.bandwidth, "64 rows by 4096 x 8192, bf16")


def _math(torch: Any, base: GpuProfile) -> Measured:
    rows, weight = _random(torch, _MANY_ROWS, _HIDDEN), _random(torch, _HIDDEN, 2 * _HIDDEN)
    seconds = _timed(torch, lambda: rows @ weight, launches=10)
    rate = 2 * rows.numel() * weight.shape[1] / seconds
    # only an upper bound: a decode step's GEMMs are far smaller
    return _share(
        min(base.math_efficiency, rate / base.bf16_flops),
        f"{_MANY_ROWS} rows reach {rate / 1e12:.0f} TFLOPS in bf16; the base's value if lower",
    )


def _grouped(torch: Any, base: GpuProfile) -> Measured:
    experts = _random(torch, _EXPERTS, _HIDDEN, 2 * _INTERMEDIATE)
    rows = _random(torch, _EXPERTS, 16, _HIDDEN)
    seconds = _timed(torch, lambda: torch.bmm(rows, experts), launches=10)
    read = experts.numel() * 2 / seconds
    return _share(read / base.bandwidth, "32 experts of 16 rows as one batched GEMM, bf16")


def _attention(torch: Any, base: GpuProfile) -> Measured:
    requests, kv, group, context, size = 16, 4, 16, _CONTEXT, 128
    query = _random(torch, requests, kv, group, size)  # a KV head's queries are its rows
    keys = _random(torch, requests, kv, context, size)
    values = _random(torch, requests, kv, context, size)
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = _timed(torch, lambda: attend(query, keys, values), launches=10)
    read = 2 * keys.numel() * 2 / seconds
    how = "SDPA of 16 requests of 8192 tokens, 64 heads on 4; a decode kernel is faster"
    return _share(max(base.attention_efficiency, read / base.bandwidth), how)


def _two_gpus(torch: Any, base: GpuProfile) -> dict[str, Measured]:
    source = torch.empty(2**28, device="cuda:0", dtype=torch.uint8)
    target = torch.empty(2**28, device="cuda:1", dtype=torch.uint8)
    seconds = _wall(torch, lambda: target.copy_(source, non_blocking=True), 10)
    rate = source.numel() / seconds
    found = {
        "link_efficiency": _share(rate / base.link, f"peer copies reach {rate / 1e9:.0f} GB/s")
    }
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    meeting = Path(tempfile.mkdtemp(prefix="sglang_afd_calibrate_"))
    processes = [
        context.Process(target=_echo, args=(rank, meeting / "ranks", answers), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        seconds = answers.get(timeout=_PEER_TIMEOUT)
        found["collective_seconds"] = Measured(
            max(0.0, seconds - 2 * base.collective_peer_seconds),
            "NCCL send and receive of a row, there and back, less two ranks",
        )
    except queue.Empty:
        print("calibrate: no answer from NCCL in time; the base's exchange latency is kept")
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        shutil.rmtree(meeting, ignore_errors=True)
    return found


def _echo(rank: int, meeting: Path, answers: Any) -> None:
    """Process `rank` of the latency measurement."""
    import datetime

    import torch
    from torch import distributed

    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    row = torch.zeros(_HIDDEN, device=f"cuda:{rank}", dtype=torch.bfloat16)

    def there_and_back() -> None:
        for sender in (0, 1):
            (distributed.send if rank == sender else distributed.recv)(row, 1 - rank)

    seconds = _wall(torch, there_and_back, 200)
    if rank == 0:
        answers.put(seconds)
    distributed.destroy_process_group()


def _share(value: float, how: str) -> Measured:
    return Measured(min(value, 1.0), how)


def _rotating(items: list[Any], use: Callable[[Any], Any]) -> Callable[[], Any]:
    """Use the items in turn, so that none is found in the L2 cache."""
    state = {"next": 0}

    def step() -> Any:
        state["next"] = (state["next"] + 1) % len(items)
        return use(items[state["next"]])

    return step


def _timed(torch: Any, launch: Callable[[], Any], launches: int = _LAUNCHES) -> float:
    """Seconds of one launch inside a CUDA graph of `launches`: the best of some replays."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    return min(_wall(torch, graph.replay, 1) for _ in range(_REPEATS)) / launches


def _wall(torch: Any, call: Callable[[], Any], times: int) -> float:
    """Seconds of one call, after one to warm up."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times
