"""Faults that a server can have on purpose, so that a test shows that it would notice.

Name one in the environment of a world that a zygote forks, ``start(argv, env={FAULT: NAME})``, or
give a command `only_children`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

FAULT = "SGLANG_AFD_TEST_FAULT"
_NEW_MOUNTS, _PRIVATE = 0x00020000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
NETWORK = "SGLANG_AFD_TEST_NETWORK"
"""Path of the network namespace that a world's processes are to run in."""
_IN_CHILDREN = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    sys.path.append({folder!r})
    import faults
    faults.plant()
"""


def plant() -> None:
    """Give this process the fault that its environment names, if it names one."""
    if name := os.environ.get(FAULT):
        {fault.__name__: fault for fault in FAULTS}[name]()
    if path := os.environ.get(NETWORK):
        join(path)
        _have_own_shared_memory()


def join(network: str) -> None:
    """Move this thread, and what it starts, into the network namespace at a path.

    Raises:
        OSError: it may not.
    """
    with open(network) as file:
        _call("setns", file.fileno(), 0)


def _have_own_shared_memory() -> None:
    """By what they share there, SGLang's ranks find out whether they are on one host."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", None, b"/", None, _PRIVATE, None)
    _call("mount", b"none", b"/dev/shm", b"tmpfs", 0, None)


def _call(name: str, *args: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def only_children(name: str, folder: Path) -> dict[str, str]:
    """Environment of a command whose spawned processes have a fault that it has not itself."""
    (folder / "sitecustomize.py").write_text(_IN_CHILDREN.format(folder=str(Path(__file__).parent)))
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {FAULT: name, "PYTHONPATH": path}


def hold_every_tensor() -> None:
    """Ranks read all tensors, whatever their role, and keep them until loading ends.

    The filter by role alone would not show: safetensors maps files, so that a tensor that nobody
    reads takes no memory.
    """
    from sglang_afd.upstream import loading

    def read(original: Any, files: list[str], *args: Any, **kwargs: Any) -> Iterator[tuple]:
        import safetensors

        held = []
        for file in files:
            with safetensors.safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                    held.append(tensors.get_tensor(name).clone())
                    yield name, held[-1]

    loading.HOOKS = tuple(replace(hook, fn=read) for hook in loading.HOOKS)


def hook_nothing() -> None:
    """One hook more, on something that SGLang does not have."""
    from sglang_afd import upstream

    original = upstream.all_hooks

    def all_hooks(config: Any) -> tuple:
        from sglang_afd.upstream.hooks import Hook, Kind

        target = "sglang.srt.managers.scheduler.Scheduler.no_such_method"
        return (*original(config), Hook(target, Kind.AFTER, print, "planted by a test"))

    upstream.all_hooks = all_hooks


def another_version() -> None:
    """SGLang says that it is a later one."""
    import sglang

    sglang.__version__ = "0.5.24"


def another_version_in_children() -> None:
    """The same in the processes that a forked launcher forks, which check for themselves then."""

    def forget() -> None:
        from sglang.srt import plugins

        plugins._plugins_loaded = False
        another_version()

    os.register_at_fork(after_in_child=forget)


SPOILT_LAYER, SPOILT_EXPERT = 2, 5
_SPOILT = f"model.layers.{SPOILT_LAYER}.mlp.experts.{SPOILT_EXPERT}."


def _load_experts(change: Callable[[str, Any], tuple[str, Any]]) -> None:
    """FFN ranks load what `change` makes of each name and tensor."""
    from sglang_afd.upstream.expert_layers import ExpertModel

    original = ExpertModel.load_weights

    def load(model: Any, weights: Any) -> None:
        original(model, (change(name, tensor) for name, tensor in weights))

    ExpertModel.load_weights = load


def scale_expert() -> None:
    """One expert's output is 1.01 times what it should be."""
    down = f"{_SPOILT}down_proj.weight"
    _load_experts(lambda name, tensor: (name, tensor * 1.01 if name == down else tensor))


def zero_expert() -> None:
    """One expert gives nothing."""
    _load_experts(lambda name, tensor: (name, tensor * 0 if name.startswith(_SPOILT) else tensor))


def swap_experts() -> None:
    """Two experts of one rank stand in each other's place."""
    other = _SPOILT.replace(f".{SPOILT_EXPERT}.", f".{SPOILT_EXPERT - 1}.")

    def swap(name: str, tensor: Any) -> tuple[str, Any]:
        for here, there in ((_SPOILT, other), (other, _SPOILT)):
            if name.startswith(here):
                return name.replace(here, there), tensor
        return name, tensor

    _load_experts(swap)


def serve_other_ranks_experts() -> None:
    """FFN ranks load the experts that are another one's: their order is reversed."""
    from sglang_afd.topology import Topology

    original = Topology.experts_of

    def experts_of(topology: Any, rank: int, num_experts: int) -> range:
        first, last = topology.ffn_world[0], topology.ffn_world[-1]
        return original(topology, first + last - rank, num_experts)

    Topology.experts_of = experts_of


def _exchange(change: Callable[[Any, Any, Any, Any], Any]) -> None:
    """Attention ranks make ``change(call, hidden, ids, weights)`` of each layer's exchange."""
    from sglang_afd.attention.exchange import AttentionExchange

    original = AttentionExchange.__call__

    def exchange(self: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        return change(lambda *args: original(self, *args), hidden, ids, weights)

    AttentionExchange.__call__ = exchange


def drop_router_weights() -> None:
    """Every expert of a token counts as much."""

    def drop(call: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        return call(hidden, ids, weights * 0 + 1 / weights.shape[1])

    _exchange(drop)


def nan_once() -> None:
    """One row of one decode step's first MoE layer is NaN: a single token of a single request."""
    steps = itertools.count()

    def spoil(call: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        output = call(hidden, ids, weights)
        if 0 < len(hidden) < 20 and next(steps) == 40:
            output[0] = float("nan")
        return output

    _exchange(spoil)


def no_memory_once() -> None:
    """One step of an FFN rank asks for more memory than any machine has."""
    import torch

    from sglang_afd.ffn import serve

    original, steps = serve.serve_rounds, itertools.count()

    def starve(*args: Any) -> None:
        if next(steps) == 40:
            torch.empty(1 << 60)
        original(*args)

    serve.serve_rounds = starve


def log_on_a_full_disk() -> None:
    """From one decode step on, an attention rank can write no line of its log."""
    steps = itertools.count()

    def fill(call: Any, hidden: Any, ids: Any, weights: Any) -> Any:
        if next(steps) == 40:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, 1)
            os.dup2(full, 2)
        return call(hidden, ids, weights)

    _exchange(fill)


FAULTS = (
    scale_expert,
    zero_expert,
    swap_experts,
    serve_other_ranks_experts,
    drop_router_weights,
    nan_once,
    no_memory_once,
    log_on_a_full_disk,
    hold_every_tensor,
    hook_nothing,
    another_version,
    another_version_in_children,
)
