"""How both trainings optimise: the settings of it, the optimiser, and its rate over the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Optimising:
    """Part of what determines a training's result."""

    seed: int
    tokens_per_step: int
    peak_lr: float = 1.5e-3
    final_lr: float = 1.5e-5
    warmup_steps: int = 200
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def learning_rate(self, step: int, steps: int) -> float:
        """Linear warm-up, over a tenth of the steps at most, then a cosine from peak to final."""
        warmup = min(self.warmup_steps, max(1, steps // 10))
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        fraction = (step - warmup) / max(1, steps - warmup)
        above = self.peak_lr - self.final_lr
        return self.final_lr + above * 0.5 * (1 + math.cos(math.pi * fraction))


def optimizer_for(model: nn.Module, settings: Optimising) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.peak_lr, betas=settings.betas, fused=on_gpu)
