"""Experts in SGLang's terms: what A ranks have in their place, and how F ranks build and run them.

F uses SGLang's own ``FusedMoE`` layer with its own quantisation methods, built for this rank's
experts alone: a layer of E/F experts on one expert-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from torch import nn

from sglang_afd.attention.exchange import AttentionExchange
from sglang_afd.attention.slots import SlotChoice
from sglang_afd.context import current
from sglang_afd.dispatch.transport import MaskedBatch, RowBatch
from sglang_afd.families import ExpertTensor
from sglang_afd.topology import Mode, Role
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.shadow import ALONE, parallel_view

_exchange: AttentionExchange | None = None


def connect(exchange: AttentionExchange) -> None:
    """Give the A rank's expert stand-ins the exchange they call."""
    global _exchange
    _exchange = exchange


class RemoteExperts(nn.Module):
    """Stands where a model has its experts, holds no weights, and runs them on F.

    It has the attributes that SGLang's model classes read of ``FusedMoE``.
    """

    runner_backend = None
    num_local_experts = 0
    should_fuse_routed_scaling_factor_in_topk = False

    def __init__(self, *, layer_id: int, routing_method_type: Any = None, **_: Any) -> None:
        from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

        super().__init__()
        self.layer_id, self.routing_method_type = layer_id, routing_method_type
        self.moe_runner_config = MoeRunnerConfig(inplace=False)
        context = current()
        self.slots = (
            SlotChoice(
                context.placed.slots_of(layer_id),
                context.rank,
                most=context.config.expert_replicas + 1,
            )
            if context.config.expert_replicas or context.config.expert_placement
            else None
        )

    def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        """[n, H] rows and SGLang's top-k output -> [n, H] combined rows."""
        if _exchange is None:
            raise RuntimeError("the experts were called before the transport was made")
        ids = topk_output.topk_ids
        ids = ids if self.slots is None else self.slots(ids)
        return _exchange(hidden_states, ids, topk_output.topk_weights)


def choose_anew(model: nn.Module) -> None:
    """Have an A rank's model send rows to the slots where experts lie now."""
    for module in model.modules():
        if isinstance(module, RemoteExperts) and module.slots is not None:
            module.slots.use(current().placed.slots_of(module.layer_id))


class ExpertModel(nn.Module):
    """All that an F rank holds: its experts of every MoE layer, in order.

    Raises:
        ValueError: from `load_weights`, if a tensor of an owned expert is missing.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        from sglang.srt.layers.moe.fused_moe_triton import layer as module

        super().__init__()
        context = current()
        facts = context.facts
        self.config, self.quant_config = config, quant_config
        self.start_layer = 0
        self.end_layer = getattr(config, "text_config", config).num_hidden_layers
        with parallel_view(module, **ALONE):
            self.layers = nn.ModuleDict(
                {
                    str(layer): module.FusedMoE(
                        num_experts=len(context.own_slots),
                        top_k=facts.top_k,
                        layer_id=layer,
                        hidden_size=facts.hidden_size,
                        intermediate_size=facts.intermediate_size,
                        quant_config=quant_config,
                        prefix=context.family.experts.prefix(layer),
                        uses_expert_location=False,
                        inplace=False,
                        no_combine=True,
                    )
                    for layer in facts.layers
                }
            )
        for layer in self.layers.values():
            # SGLang's GPU kernels look for ids of -1 only where not all experts are here.
            layer.moe_runner_config.num_experts = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's expert tensors; other names are ignored.

        Raises:
            ValueError: the checkpoint lacks a tensor, or has one that the layers have no place for.
        """
        context = current()
        parameters = dict(self.named_parameters())
        suffixes = {name.split("_", 1)[1] for name in parameters}
        slots = {layer: _places(context.held(layer)) for layer in context.facts.layers}
        missing = {
            ExpertTensor(layer, expert, *rest)
            for layer, held in slots.items()
            for expert, *rest in product(held, ("w1", "w2", "w3"), suffixes)
        }
        for name, value in weights:
            tensor = context.family.expert_tensor(name)
            if tensor is None or tensor.expert not in slots.get(tensor.layer, {tensor.expert: []}):
                continue
            weight = "w2" if tensor.projection == "w2" else "w13"
            target = f"layers.{tensor.layer}.{weight}_{tensor.suffix}"
            parameter = parameters.get(target)
            if parameter is None:
                raise ValueError(f"{context.name} has no place for {name} (no {target})")
            for slot in slots[tensor.layer][tensor.expert]:
                parameter.weight_loader(
                    parameter, value, target, shard_id=tensor.projection, expert_id=slot
                )
            missing.discard(tensor)
        if missing:
            raise ValueError(
                f"{context.name} found no {context.family.experts.spell(min(missing))} "
                f"({len(missing)} tensors are missing): the checkpoint is incomplete"
            )

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """An F rank runs `sglang_afd.ffn.serve`, never a forward of its own."""
        raise RuntimeError("an FFN rank has no model forward of its own")

    def experts(self) -> list[Callable[[RowBatch | MaskedBatch], torch.Tensor]]:
        """The layers as the serve loop calls them."""
        return [_runner(layer) for layer in self.layers.values()]


def _places(held: Iterable[int]) -> dict[int, list[int]]:
    """The slots of each expert among those of this rank."""
    places: dict[int, list[int]] = {}
    for slot, expert in enumerate(held):
        places.setdefault(expert, []).append(slot)
    return places


def _runner(layer: Any) -> Callable[[RowBatch | MaskedBatch], torch.Tensor]:
    def run(batch: RowBatch | MaskedBatch) -> torch.Tensor:
        if isinstance(batch, MaskedBatch):
            return _run_masked(layer, batch)
        return run_rows(layer, batch)

    return run


def run_rows(layer: Any, batch: RowBatch) -> torch.Tensor:
    """Rows with several experts each -> [R, K, H], an output for each, zero where there is none."""
    device = next(layer.parameters()).device
    hidden, ids = batch.hidden.to(device), batch.expert_ids.to(device)
    if not hidden.shape[0]:
        return hidden.new_zeros(*ids.shape, hidden.shape[1])
    if device.type != "cpu":
        return _run_core(layer, hidden, ids).view(*ids.shape, hidden.shape[1])
    # The CPU's kernels know neither -1 nor outputs that are not combined: a row for every pair.
    token, place = (ids >= 0).nonzero(as_tuple=True)
    outputs = hidden.new_zeros(*ids.shape, hidden.shape[1])
    outputs[token, place] = _run_core(layer, hidden[token], ids[token, place].unsqueeze(1))
    return outputs


def _run_core(layer: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    dispatched = StandardDispatchOutput(
        hidden_states=hidden,
        hidden_states_scale=None,
        topk_output=StandardTopKOutput(ones, ids, ones),
    )
    return layer.run_moe_core(dispatched).hidden_states


def _run_masked(layer: Any, batch: MaskedBatch) -> torch.Tensor:
    """Rows grouped by expert: SGLang's masked grouped GEMMs."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLDispatchOutput

    nothing = torch.empty(0, 1, dtype=torch.int32, device=batch.hidden.device)
    return layer.run_moe_core(
        DeepEPLLDispatchOutput(
            hidden_states=batch.hidden,
            hidden_states_scale=batch.scales,
            topk_ids=nothing,
            topk_weights=nothing.float(),
            masked_m=batch.counts,
            expected_m=batch.expected,
        )
    ).hidden_states


def _experts_of_role(original: Callable[..., type], *args: Any, **kwargs: Any) -> type:
    return RemoteExperts if current().role is Role.ATTENTION else original(*args, **kwargs)


def _model_of_role(result: tuple[type, str], *args: Any, **kwargs: Any) -> tuple[type, str] | None:
    return (ExpertModel, result[1]) if current().role is Role.FFN else None


def _no_dispatcher(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher

    class ServedByTransport(BaseDispatcher):
        """Rows reach an F rank's layers through the serve loop, not through a dispatcher."""

        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("an FFN rank's layer is run by the serve loop")

        combine = dispatch

    return ServedByTransport()


def _locate_over_ffn_ranks(
    original: Callable[..., Any], *, model_config: Any, moe_ep_rank: int
) -> Any:
    from sglang.srt.eplb import expert_location as module

    # SGLang's map knows no slots of ours, and wants experts that divide over its ranks.
    config = current().config
    whole = config.mode is Mode.CAD or config.expert_replicas
    ranks = 1 if whole else len(current().topology.ffn_world)
    with parallel_view(module, ep_size=ranks):
        return original(model_config=model_config, moe_ep_rank=0)


HOOKS = (
    Hook(
        "sglang.srt.layers.moe.ep_moe.layer.get_moe_impl_class",
        Kind.AROUND,
        _experts_of_role,
        "models on A ranks build a stand-in instead of experts",
    ),
    Hook(
        "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher",
        Kind.REPLACE,
        _no_dispatcher,
        "an F rank's layers get their rows from the serve loop",
    ),
    Hook(
        "sglang.srt.model_loader.utils.get_model_architecture",
        Kind.AFTER,
        _model_of_role,
        "an F rank runs the experts-only model",
    ),
    Hook(
        "sglang.srt.eplb.expert_location.compute_initial_expert_location_metadata",
        Kind.AROUND,
        _locate_over_ffn_ranks,
        "experts lie on F ranks alone; A ranks do not count",
    ),
)
