"""Environment and SGLang arguments of a server on the CPU reference platform."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

MAX_TOTAL_TOKENS = 16384
"""KV pool of each rank, in tokens.  SGLang would size it from the free memory of the whole machine,
in each rank again: gigabytes for a small model."""

MAX_STATES = 160
"""Linear attention's states of each rank that holds requests, for the same reason: SGLang takes
five a request, so that 32 requests run at once."""

BIND = "SGLANG_CPU_OMP_THREADS_BIND"
"""Which cores each rank is bound to."""

REQUIRED_ENVIRONMENT = {
    # The platform's entry point; plugins of other platforms are then not even imported.
    "SGLANG_PLATFORM": "sglang_afd_cpu",
    # SGLang's own CPU mode imports sgl-kernel.
    "SGLANG_USE_CPU_ENGINE": "0",
    # On a machine with GPUs, SGLang would otherwise pick CUDA kernels for CPU tensors.
    "CUDA_VISIBLE_DEVICES": "",
}
"""Without these a rank does not run on the CPU, whatever the user's own environment says."""

_ARGUMENTS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    # the flags that mean this setting (ours first), and our value (None: a switch)
    (("--device",), "cpu"),
    (("--attention-backend", "--prefill-attention-backend"), "torch_native"),
    (("--sampling-backend",), "pytorch"),
    (("--max-total-tokens", "--mem-fraction-static"), str(MAX_TOTAL_TOKENS)),
    (("--disable-custom-all-reduce",), None),
)


def cpu_environment(world_size: int) -> dict[str, str]:
    """Environment for `world_size` ranks on this host; set it before SGLang is imported."""
    cores = sorted(os.sched_getaffinity(0))
    threads = max(1, len(cores) // world_size)
    return {
        **REQUIRED_ENVIRONMENT,
        # The rest is the user's to choose.
        BIND: thread_binding(cores, world_size),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # torch.compile would need a C++ compiler and seconds of tracing in the first requests.
        "TORCH_COMPILE_DISABLE": "1",
        # A dead rank ends the server at once, in place of a minute's wait for CUDA core dumps.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }


def environment_problem(environment: Mapping[str, str], ranks: int) -> str | None:
    """What of the user's own thread settings no rank could start with, ``what; mend``, or None.

    Args:
        ranks: those that start here.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = environment.get(name) or "1"
        if not value.strip().isdecimal() or int(value) < 1:
            return f"{name} is {value!r}, which is no number of threads; correct it, or unset it"
    binding = environment.get(BIND)
    if not binding or (binding == "all" and ranks == 1):
        return None
    mend = f"give each of the {ranks} ranks its cores, as in 0-1|2,3, or unset it"
    fields = binding.split("|")
    try:
        empty = not all(parse_cores(field) for field in fields)
    except ValueError:
        empty = True
    if empty:
        return f"{BIND} is {binding!r}, which names no cores; {mend}"
    if len(fields) < ranks:
        return f"{BIND} has {len(fields)} fields; {mend}"
    return None


def parse_cores(field: str) -> list[int]:
    """Core numbers of one field of `BIND`: ``"0-2,5"`` is 0, 1, 2, 5.

    Raises:
        ValueError: it is no such field.
    """
    cores: list[int] = []
    for part in field.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def thread_binding(cores: Sequence[int], world_size: int) -> str:
    """One field of cores a rank, as ``SGLANG_CPU_OMP_THREADS_BIND`` takes them.

    Each rank gets cores of its own; with more ranks than cores every rank may use all of them,
    since a fixed share would leave cores idle while two ranks queue for one.
    """
    share = len(cores) // world_size
    if share == 0:
        return "|".join([_field(cores)] * world_size)
    return "|".join(_field(cores[rank * share : (rank + 1) * share]) for rank in range(world_size))


def cpu_server_args(given: Sequence[str]) -> list[str]:
    """Arguments to add to the command line `given`: defaults for what it leaves open."""
    names = {arg.split("=", 1)[0] for arg in given if arg.startswith("--")}
    added: list[str] = []
    for flags, value in _ARGUMENTS:
        if names.isdisjoint(flags):
            added += [flags[0]] if value is None else [flags[0], value]
    return added


def _field(cores: Sequence[int]) -> str:
    return ",".join(str(core) for core in cores)
