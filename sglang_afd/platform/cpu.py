"""The platform class that SGLang loads (entry point group ``sglang.srt.platforms``).

SGLang's own CPU mode (``SGLANG_USE_CPU_ENGINE=1``) imports sgl-kernel's CPU build.  This platform
leaves that mode off and registers as an out-of-tree one, for which every fused operator runs its
``forward_native``; what is then still missing is mended in `sglang_afd.platform.hooks`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on the host's cores; gloo between ranks; no graphs, no Triton."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def init_backend(self) -> None:
        """Apply the settings of this platform; SGLang calls it once in each rank."""
        from sglang_afd.platform.settings import apply_settings

        apply_settings()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """As on CUDA: a cached prefix keeps its own copy of the state, and schedules overlap."""
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """EAGLE-3; see `sglang_afd.platform.speculation`."""
        return algorithm == "EAGLE3"

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Where the tokens of a step lie in the KV cache."""
        from sglang_afd.platform.draft_slots import of_places

        return of_places

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Never inductor: it needs a C++ compiler, and compiles inside the first requests."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
