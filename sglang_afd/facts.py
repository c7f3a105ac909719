"""`Facts`: everything that the gates look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_afd.checkpoint import Checkpoint
from sglang_afd.command_line import int_value
from sglang_afd.config import AfdConfig
from sglang_afd.families import MoeFacts, UnsupportedModel
from sglang_afd.machine import Gpu, Machine


class Refusal(NamedTuple):
    """Why a gate does not let a deployment pass, and what to do about it."""

    message: str
    mend: str

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """The refusal in an error whose message is ``what; mend``."""
        what, _, mend = str(error).partition("; ")
        return cls(what, mend)


@dataclass(frozen=True)
class Facts:
    """A deployment as asked for, its checkpoint, and the machine it is to run on."""

    config: AfdConfig
    args: tuple[str, ...]
    """SGLang's arguments, as the command gives them."""
    checkpoint: Checkpoint
    machine: Machine
    on_cpu: bool
    """The ranks run on the CPU: asked for, or there is no accelerator."""
    environment: Mapping[str, str] = field(default_factory=dict)
    why_transport: str = "asked for"
    """Why the rows travel as they do."""
    nsys: str = ""
    """Folder for reports of Nsight Systems; empty: it does not run."""
    validation: str = ""
    """The report of a validation, a file; empty: none is given."""

    @property
    def moe(self) -> MoeFacts | None:
        """The routed experts; None where the model gate refuses the checkpoint."""
        try:
            return self.checkpoint.moe_facts() if self.checkpoint.config is not None else None
        except UnsupportedModel:
            return None

    def gpus_used(self) -> tuple[Gpu, ...]:
        """This machine's GPUs that the command's ranks run on, one each."""
        first = int_value(self.args, "--base-gpu-id", default=0)
        step = int_value(self.args, "--gpu-id-step", default=1)
        return self.machine.gpus[first::step][: len(self.config.local_ranks())]
