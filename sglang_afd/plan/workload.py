"""`Workload`: the requests that a deployment serves."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.plan.errors import PlanError, real, whole
from sglang_afd.plan.shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """Requests of one kind, decoded in full batches."""

    context: int
    """Tokens of a prompt."""
    output: int = 0
    """Tokens generated for it."""
    width: int = 1
    """Rows of a request in a step: 1, or the draft tokens that a verify step checks, and one."""
    accepted: float = 1.0
    """Tokens a request gains in a step: 1 to `width`."""
    kv_itemsize: int = 2
    """Bytes of a cache element: 2, or 1 (FP8)."""

    def __post_init__(self) -> None:
        whole("--context", self.context, most=10**8)
        whole("--output", self.output, least=0, most=10**8)
        whole("--verify-width", self.width, most=64)
        real("--accepted", self.accepted, above=0.0, most=64.0)
        if not 1 <= self.accepted <= self.width:
            raise PlanError("--accepted", f"{self.accepted:g} is not between 1 and {self.width}")
        if self.kv_itemsize not in (1, 2, 4):
            raise PlanError("--kv-bytes", f"{self.kv_itemsize} is not 1, 2 or 4")

    @property
    def held(self) -> float:
        """Mean tokens that a request holds while it is decoded."""
        return self.context + self.output / 2

    def request_bytes(self, shape: ModelShape) -> float:
        """Most memory that a request holds on its attention rank."""
        tokens = self.context + self.output + self.width - 1
        return tokens * shape.kv_bytes(self.kv_itemsize) + shape.state_bytes
