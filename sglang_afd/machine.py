"""What this machine offers: accelerators and kernel packages, found without importing torch.

Asking torch costs seconds and initialises CUDA, which forked processes cannot use afterwards.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KERNEL_PACKAGES = ("deep_ep", "deep_gemm")
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
_P2P_WRITE = 1  # NVML_P2P_CAPS_INDEX_WRITE
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: its name and compute capability, e.g. (9, 0)."""

    name: str
    capability: tuple[int, int]
    uuid: str = ""
    memory: int = 0
    """Bytes; 0: not known."""
    unreachable: frozenset[str] = frozenset()
    """UUIDs of this machine's devices whose memory it cannot write to."""


@dataclass(frozen=True)
class Machine:
    """What ranks that start here can use."""

    gpus: tuple[Gpu, ...] = ()
    """CUDA devices that torch would see, in order."""
    packages: frozenset[str] = frozenset()
    """Those of `KERNEL_PACKAGES` that are installed."""
    other_accelerator: bool = False
    """Torch is built for, and would use, an accelerator that is no CUDA device."""

    @property
    def has_accelerator(self) -> bool:
        """Whether SGLang would pick a device other than the CPU."""
        return bool(self.gpus) or self.other_accelerator


def this_machine() -> Machine:
    """Look at the machine and the installed packages."""
    build = _torch_build()
    gpus = visible(_nvml_gpus(), os.environ) if build.get("cuda") else ()
    rocm = bool(build.get("hip")) and Path("/dev/kfd").exists()
    found = (name for name in KERNEL_PACKAGES if importlib.util.find_spec(name) is not None)
    return Machine(gpus, frozenset(found), other_accelerator=rocm)


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The devices that ``CUDA_VISIBLE_DEVICES`` leaves, in its order.

    As CUDA does, it names devices by index or by the beginning of their UUID, and ends at the first
    name that is wrong.
    """
    selection = environment.get("CUDA_VISIBLE_DEVICES")
    if selection is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in selection.split(",")):
        if name.isdigit() and int(name) < len(gpus):
            chosen.append(gpus[int(name)])
            continue
        matching = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if len(matching) != 1:
            break
        chosen += matching
    return tuple(chosen)


def _torch_build() -> Mapping[str, object]:
    """The constants of torch/version.py: ``cuda`` and ``hip`` are versions, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).with_name("version.py")
    found = importlib.util.spec_from_file_location("torch_version", file)
    if found is None or found.loader is None or not file.exists():
        return {}
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return vars(module)


def _nvml_gpus() -> tuple[Gpu, ...]:
    """All devices of NVIDIA's driver; none if there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2():
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        gpus = [_gpu(nvml, index) for index in range(count.value)]
        return tuple(_with_reach(nvml, gpus, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES))
    nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_UUID_BYTES))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    nvml.nvmlDeviceGetMemoryInfo(handle, memory)
    capability = (major.value, minor.value)
    return Gpu(name.value.decode(), capability, uuid.value.decode(), int(memory[0]))


def _with_reach(nvml: ctypes.CDLL, gpus: Sequence[Gpu], index: int) -> Gpu:
    """`gpus[index]` with what the driver says about its peers; what it cannot say counts as yes."""
    handles = [ctypes.c_void_p() for _ in gpus]
    for peer, handle in enumerate(handles):
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(peer), ctypes.byref(handle))
    out = set()
    for peer, handle in enumerate(handles):
        status = ctypes.c_int()
        asked = nvml.nvmlDeviceGetP2PStatus(
            handles[index], handle, ctypes.c_int(_P2P_WRITE), ctypes.byref(status)
        )
        if peer != index and asked == 0 and status.value != 0:
            out.add(gpus[peer].uuid)
    return dataclasses.replace(gpus[index], unreachable=frozenset(out))
