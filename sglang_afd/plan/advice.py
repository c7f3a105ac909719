"""What the planner says of a deployment that is about to start: the gate's performance step."""

from __future__ import annotations

import re
from typing import NamedTuple

from sglang_afd.command_line import int_value
from sglang_afd.config import ConfigError
from sglang_afd.facts import Facts
from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.layouts import Layout, one_group
from sglang_afd.plan.modes import contract
from sglang_afd.plan.profile import read_profile, shipped
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.search import Question, search
from sglang_afd.plan.shape import shape_of
from sglang_afd.plan.workload import Workload
from sglang_afd.speculation import asked

LOSS = 0.10
"""Predicted loss against colocated from which on the advice is a warning."""
_CONTEXT = 8192


class Advice(NamedTuple):
    """What is predicted, and (a warning) what would be better."""

    message: str
    mend: str = ""


def advise(facts: Facts) -> Advice | None:
    """The prediction for the deployment's ratio with what this build serves; None on CPUs.

    Never an error: what cannot be predicted is said to be so.
    """
    if facts.on_cpu or not facts.machine.gpus or facts.checkpoint.config is None:
        return None
    try:
        return _advice(facts)
    except (PlanError, ConfigError) as error:
        return Advice(f"not predicted: {error}")


def _advice(facts: Facts) -> Advice:
    name = facts.machine.gpus[0].name
    words = re.split(r"[^a-z0-9]+", name.lower())
    profile = next((p for p in shipped() if p in words), None)
    if profile is None:
        return Advice(f"not predicted: no profile of {name}; see `python -m sglang_afd.plan`")
    topology = facts.config.topology
    if topology.attention_tp > 1:
        return Advice("not predicted: the planner does not know attention TP")
    if facts.config.emulation.active:
        return Advice("not predicted: ranks are emulated")
    if asked(facts.args) is not None:
        return Advice("not predicted: how many of the draft's tokens are right is not known")
    assert facts.checkpoint.config is not None
    model = shape_of(facts.checkpoint.config)
    context = int_value(facts.args, "--context-length", default=_CONTEXT)
    context = min(max(context, 1), _CONTEXT)
    config = facts.config
    mode = contract("sync" if config.lanes == 1 else "async", transport=config.transport)
    answer = search(
        Question(
            shape=model,
            gpu=read_profile(profile),
            gpus=topology.world_size,
            load=Workload(context),
            routing=Routing(model.experts, model.top_k),
            transport=facts.config.transport,
            lanes=(facts.config.lanes,),
            kinds=("colocated", "afd"),
            graphs=mode.graphs,
        )
    )
    chosen = f"{topology.attention_ranks}A{topology.ffn_ranks}F"
    mine = max(
        (c for c in answer.candidates if c.layout.name == chosen),
        key=lambda c: c.per_gpu,
        default=None,
    )
    base, best = answer.best("colocated"), answer.best()
    if mine is None:
        reason = next((r.reason for r in answer.refused if r.name == chosen), "it does not fit")
        return Advice(f"{chosen} is not predicted at {context} tokens of context: {reason}")
    graphs = "" if mode.graphs else ", without CUDA graphs"
    text = f"{chosen} is predicted at {mine.per_gpu:.0f} tokens/s/GPU in full decode batches of "
    text += f"{context} tokens of context{graphs}"
    if base is None or best is None or mine.per_gpu >= (1 - LOSS) * base.per_gpu:
        return Advice(text)
    loss = 1 - mine.per_gpu / base.per_gpu
    return Advice(
        f"{text}: {loss:.0%} less than {_words(base.layout)} at {base.per_gpu:.0f}",
        f"if throughput is the aim, {_words(best.layout)} is predicted best "
        f"({best.per_gpu:.0f} tokens/s/GPU); `python -m sglang_afd.plan` tells more",
    )


def _words(layout: Layout) -> str:
    """A layout for people who have not seen the planner's table."""
    if layout.kind == "colocated":
        ranks = layout.attention_ranks
        shared = f"expert-parallel over {ranks} GPUs" if ranks > 1 else "on each GPU alone"
        return f"SGLang without AFD, {shared}"
    return one_group(layout)
