"""`RankContext`: what one scheduler process knows of its place in the deployment.

One per process, set when SGLang's scheduler learns its rank; hooks ask it for the role instead of
looking at ranks themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sglang_afd.config import AfdConfig, fingerprint
from sglang_afd.dispatch.step_plan import Caps, PlanRow, StepPlan
from sglang_afd.families import ExpertTensor, Family, MoeFacts
from sglang_afd.families.family import FusedExperts
from sglang_afd.lanes import StepsInFlight
from sglang_afd.observe.stages import DeviceClock, HostClock, Stage, StepTimer
from sglang_afd.placement import Placement, in_order
from sglang_afd.topology import Mode, Role, Topology

_OWN_WORK = {
    Role.ATTENTION: Stage.ATTENTION,
    Role.FFN: Stage.EXPERTS,
    Role.MODEL: Stage.MODEL,
}


@dataclass
class RankContext:
    """The rank, its role, the model's facts, and the step it is in."""

    config: AfdConfig
    rank: int
    family: Family
    facts: MoeFacts
    agreement: dict[str, object]
    """Everything that must be equal on all ranks; its hash travels with every step."""
    serving: bool = False
    """False while the rank starts: forwards are warm-ups and exchange nothing."""
    caps: Caps | None = None
    """What the transport carries in one round; known once it is made."""
    lane: int = 0
    """Whose turn it is on this rank; all ranks take the lanes in one order."""
    work: int = 0
    """Lanes in which this rank has requests to decode, a bit each."""
    plan: StepPlan | None = None
    """The plan of the step that runs next, or None outside of steps."""
    attention_layers: tuple[int, ...] = ()
    """CAD: the decoder layers, in each of which rows are exchanged; none in AFD mode."""
    row_width: float = field(init=False)
    """Elements of a row as it is sent into a layer, on average over the layers."""
    rows_per_request: int = 1
    """Rows that a request has in a decode step: with speculation, the tokens that are verified."""
    placement: Placement | None = None
    """Which expert each slot of the F ranks holds at first; None: in order."""
    next_placement: Placement | None = field(default=None, init=False)
    """What the weights that are being read are to be placed by; None: as they lie."""
    steps: StepsInFlight = field(default_factory=StepsInFlight, init=False)
    """What this rank has launched, by lane; empty with one lane."""
    row: PlanRow | None = field(default=None, init=False)
    """What this rank last contributed to a plan; None before its first step."""

    def __post_init__(self) -> None:
        self.config_hash = fingerprint(self.agreement)
        facts = self.facts
        self.row_width = facts.hidden_size
        self.placed = self.placement or in_order(
            facts.layers, facts.num_experts, self.config.expert_replicas
        )
        ffn = self.role is Role.FFN
        self.timer = StepTimer(
            _OWN_WORK[self.role],
            DeviceClock if torch.cuda.is_available() else HostClock,
            rank=self.rank if self.leads else None,
            experts=len(self.own_slots) if ffn else 0,
            sources=1 + len(self.config.emulation.emulated_by(0)) if ffn else 1,
            # with a draft ranks agree on a prefill before each step, also if none has one
            pause=1 if self.rows_per_request == 1 else 2,
        )

    @property
    def topology(self) -> Topology:
        """The deployment's layout."""
        return self.config.topology

    @property
    def role(self) -> Role:
        """This rank's role."""
        return self.topology.role_of(self.rank)

    @property
    def exchanged(self) -> tuple[int, ...]:
        """The decoder layers in which rows are exchanged between the roles."""
        return self.attention_layers or self.facts.layers

    @property
    def leads(self) -> bool:
        """Whether this rank holds requests; else it serves those that do, layer by layer."""
        return self.topology.leads(self.rank)

    @property
    def name(self) -> str:
        """How messages call this rank."""
        return self.topology.name_of(self.rank)

    def next_row(self, kind: int, rows: int) -> PlanRow:
        """Enter the next step and return what this rank contributes to its plan."""
        step_id = 0 if self.row is None else self.row.step_id + 1
        self.row = PlanRow(step_id, kind, rows, self.config_hash, self.lane, self.work)
        return self.row

    @property
    def slots(self) -> int:
        """Places for experts on all F ranks together, in every layer."""
        return self.facts.num_experts + self.config.expert_replicas

    @property
    def own_slots(self) -> range:
        """Those of this F rank."""
        return self.config.emulation.experts_of(self.rank, self.slots)

    def held(self, layer: int) -> tuple[int, ...]:
        """The expert in each slot of this F rank, in the MoE layer `layer`."""
        own = self.own_slots
        return self.placed.layers[layer][own.start : own.stop]

    def loads_fused(self, name: str) -> FusedExperts | None:
        """What this rank reads its own experts' parts of under `name`, or None."""
        fused = self.family.experts.read_fused(name)
        ours = self.role is Role.FFN and fused is not None and fused.layer in self.facts.layers
        return fused if ours else None

    def loads_tensor(self, name: str) -> bool:
        """Whether this rank's role reads the checkpoint tensor `name`."""
        if name.startswith(self.family.unread):
            return False
        tensor = self.family.expert_tensor(name)
        if self.role is Role.MODEL:
            return tensor is None or self._holds(tensor)
        if self.config.mode is Mode.CAD:
            return name.endswith(self.family.recurrent)
        if self.role is Role.ATTENTION:
            return tensor is None and self.family.experts.read_fused(name) is None
        return tensor is not None and self._holds(tensor)

    def _holds(self, tensor: ExpertTensor) -> bool:
        # Layers past the model's are those of its own draft model, which nobody runs.
        return tensor.layer in self.facts.layers and tensor.expert in self.held(tensor.layer)

    @contextmanager
    def step(self) -> Iterator[StepPlan | None]:
        """Hand out the plan for one forward; None while the rank starts (a warm-up forward).

        Raises:
            RuntimeError: a forward runs although no step was agreed.
        """
        plan = self.plan
        if plan is None and self.serving:
            raise RuntimeError(
                f"{self.name} runs a forward outside of an agreed step; its peers would wait for "
                f"rows that nobody announced"
            )
        try:
            yield plan
        finally:
            self.plan = None


_current: RankContext | None = None


def enter(context: RankContext) -> RankContext:
    """Make `context` this process's context.

    Raises:
        RuntimeError: the process has one already.
    """
    global _current
    if _current is not None:
        raise RuntimeError(f"this process already is {_current.name}")
    _current = context
    return context


def entered() -> bool:
    """Whether this process has a context."""
    return _current is not None


def current() -> RankContext:
    """This process's context.

    Raises:
        RuntimeError: the process is not a rank of an AFD deployment.
    """
    if _current is None:
        raise RuntimeError("this process is not a rank of an AFD deployment")
    return _current
