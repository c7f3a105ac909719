"""SGLang's Triton experts of one layer without a server around them, for measurements on a GPU."""

from __future__ import annotations

from typing import Any

import torch


class BareExperts:
    """One MoE layer's experts in BF16 with random weights, run by SGLang's fused kernels."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        """Allocate the weights on the current device; the same on every rank.

        Makes this process one of SGLang's schedulers as far as its kernels look: it must not
        become a server afterwards.
        """
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import ServerArgs

        publish(ServerArgs(model_path="dummy", load_format="dummy"), role="scheduler")
        generator = torch.Generator("cuda").manual_seed(1)

        def weights(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            return values.mul_(shape[-1] ** -0.5)

        self._num_experts = num_experts
        self._w13 = weights(num_experts, 2 * intermediate_size, hidden_size)
        self._w2 = weights(num_experts, hidden_size, intermediate_size)

    def combined(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[n, H] rows, [n, K] ids and router weights -> [n, H], as a colocated layer does it.

        Writes into `hidden`, which is SGLang's own way.
        """
        return self._run(hidden, expert_ids, weights, inplace=True, num_experts=self._num_experts)

    def single(self, hidden: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """[n, H] rows, [n, K] ids (-1: none) -> [n, K, H], as an F rank needs it."""
        ones = torch.ones(expert_ids.shape, device=hidden.device)
        return self._run(hidden, expert_ids, ones, inplace=False, no_combine=True)

    def _run(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        return fused_experts(
            hidden,
            self._w13,
            self._w2,
            StandardTopKOutput(weights, ids.to(torch.int32), weights),
            MoeRunnerConfig(num_local_experts=self._num_experts, **how),
        )
