"""Plants decisions that rounding cannot turn into a seeded checkpoint.

A random MoE network is chaotic in BF16 and FP8: among many random router logits or logits some are
nearly equal, rounding swaps them, and two correct servers then disagree. Here the two discrete
choices of a step get a gap that is wide beside rounding:

* Routing. A token's embedding carries, for every layer, the router directions of ``top_k`` experts
  of its own, so their router logits lead all others. Their weights stay as random as the router.
* The next token. A token has two likely successors. The experts of the last layer vote for the
  first one, each by a neuron that fires on the tokens routed to it; without the votes the second
  one leads. What random weights and context add decides when it outweighs the vote.

So the answer is wrong if rows reach wrong experts or none, and agreement is high if they reach the
right ones, whatever the order of the additions was. Experts come from the token alone, not from its
context: a test of routing's dependence on context needs another checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize

Edit = Callable[[torch.Tensor], torch.Tensor]
Normal = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Planting:
    """How strong what is planted is; right for a hidden size of 2048 and 3 layers."""

    routing: float = 10.0
    """Length of a token's component along each of its experts' router directions."""
    first_pull: float = 0.225
    """Share of a token's embedding in the output row of its first successor."""
    second_pull: float = 0.375
    """Share of a token's embedding in the output row of its second successor."""
    vote: float = 12.0
    """Length of an expert's mark in the output row of a first successor."""
    mark: float = 1.5
    """Length of the mark that an expert of the last layer adds when its planted neuron fires."""


def edits(
    config: dict[str, Any], planting: Planting, *, logit_spread: float, normal: Normal
) -> dict[str, Edit]:
    """What to do to the tensors that planting changes, by their name.

    Args:
        config: the checkpoint's config.json.
        logit_spread: standard deviation of the unplanted logits.
        normal: (name, shape) -> unit normal values, the same for the same arguments; under a
            weight's name, the values that the weight was scaled from.
    """
    hidden, vocab, experts = config["hidden_size"], config["vocab_size"], config["num_experts"]
    last = config["num_hidden_layers"] - 1
    embedding = normal("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(last + 1):
        gate = f"model.layers.{layer}.mlp.gate.weight"
        directions = normalize(normal(gate, (experts, hidden)), dim=1)  # [E, H]
        liking = normal(f"planted experts of layer {layer}", (vocab, experts))
        chosen = liking.topk(config["num_experts_per_tok"], dim=1).indices
        members = torch.zeros(vocab, experts).scatter_(1, chosen, 1.0)  # [V, E]
        embedding = embedding + planting.routing * members @ directions
    marks = normalize(normal("planted marks", (experts, hidden)), dim=1)
    # Row t of these is of the token that t is the first (the second) successor of.
    first, second = (normal(f"planted {n} successor", (vocab,)).argsort() for n in ("1st", "2nd"))
    pulls = planting.first_pull * embedding[first] + planting.second_pull * embedding[second]
    rows = logit_spread / math.sqrt(hidden) * (pulls + planting.vote * (members @ marks)[first])

    out: dict[str, Edit] = {
        "model.embed_tokens.weight": lambda _: embedding,
        "lm_head.weight": lambda head: head + rows,
    }
    for expert in range(experts):
        prefix = f"model.layers.{last}.mlp.experts.{expert}"
        fires = _first_row(directions[expert])
        out |= {
            f"{prefix}.gate_proj.weight": fires,
            f"{prefix}.up_proj.weight": fires,
            f"{prefix}.down_proj.weight": _first_column(planting.mark * marks[expert]),
        }
    return out


def _first_row(values: torch.Tensor) -> Edit:
    return lambda weight: torch.cat([values[None], weight[1:]])


def _first_column(values: torch.Tensor) -> Edit:
    return lambda weight: torch.cat([values[:, None], weight[:, 1:]], dim=1)
