"""CAD: a scheduler process becomes a model or an attention rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_afd.cad.exchange import RemoteAttention
from sglang_afd.cad.experts import SharedExperts
from sglang_afd.cad.serve import AttentionServer
from sglang_afd.config import AfdConfig
from sglang_afd.context import current
from sglang_afd.dispatch.gloo import GlooTransport
from sglang_afd.dispatch.messages import Messages
from sglang_afd.dispatch.step_plan import MOST_ROWS, Caps
from sglang_afd.upstream import cad_layers, cad_memory, cad_model, cad_states
from sglang_afd.upstream.cad_attention import Attend
from sglang_afd.upstream.cad_model import backend_class, forms, serve_experts
from sglang_afd.upstream.cad_model import connect as connect_experts
from sglang_afd.upstream.groups import make_attention_group
from sglang_afd.upstream.holdings import measure_buffers
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.ranks import (
    RUNNER,
    SCHEDULER,
    common_hooks,
    nothing_sampled,
    verify_agreement,
)
from sglang_afd.upstream.roles import on_model


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of a scheduler process in CAD mode."""
    messages: Messages
    exchange: RemoteAttention
    server: AttentionServer

    def connect(scheduler: Any) -> None:
        nonlocal messages
        from sglang.srt.runtime_context import get_parallel

        context, world = current(), get_parallel().tp_group
        verify_agreement(context, world.cpu_group)
        make_attention_group()
        messages = measure_buffers(
            lambda: Messages(context.topology, context.rank, config.exchange_timeout),
            world.device_group,
        )
        if context.leads and context.topology.leading_ranks > 1:
            connect_experts(SharedExperts(context, share_experts(scheduler.model_config.dtype)))
        context.caps = Caps(MOST_ROWS, None)  # a step is one exchange of every layer

    def share_experts(dtype: torch.dtype) -> GlooTransport:
        context = current()
        return GlooTransport(
            topology=context.topology,
            rank=context.rank,
            num_experts=context.facts.num_experts,
            hidden_size=context.facts.hidden_size,
            top_k=context.facts.top_k,
            dtype=dtype,
            caps=Caps(MOST_ROWS, None),
            timeout=config.exchange_timeout,
            both_sides=messages,
        )

    @on_model
    def attend_elsewhere(runner: Any) -> None:
        nonlocal exchange
        from sglang.srt.model_executor.model_runner import resolve_attention_backend_strs

        names = resolve_attention_backend_strs(model_runner=runner)
        runner.prefill_attention_backend_str = names.prefill
        runner.decode_attention_backend_str = names.decode
        exchange = RemoteAttention(current(), messages, forms(runner.model))
        runner.attn_backend = runner.decode_attn_backend = backend_class()(runner, exchange)

    def know_width(_: None, runner: Any) -> None:
        widths = [sum(form.inputs) for form in forms(runner.model)]
        current().row_width = sum(widths) / len(widths)

    def get_ready(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal server
        from torch.distributed import barrier

        if not current().leads:
            attend = Attend(scheduler.tp_worker.model_runner)
            dtype = scheduler.model_config.dtype
            server = AttentionServer(current(), messages, attend.layers, attend.begin, dtype)
        barrier(group=scheduler.tp_cpu_group)

    def serve(original: Callable[..., None], scheduler: Any) -> None:
        current().serving = True
        original(scheduler)

    def forward_of_role(
        original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not current().leads:
            with current().step() as plan:
                if plan is not None:
                    server.serve(plan)
        elif exchange.idle():
            with current().step():
                serve_experts(runner)
        else:
            with exchange.step():
                return original(runner, *args, **kwargs)
        return nothing_sampled(runner)

    return (
        *common_hooks(config),
        *cad_model.HOOKS,
        *cad_layers.HOOKS,
        *cad_memory.HOOKS,
        *cad_states.HOOKS,
        Hook(
            f"{SCHEDULER}.init_model_worker",
            Kind.BEFORE,
            connect,
            "all ranks agree on the configuration and meet before weights load",
        ),
        Hook(
            f"{SCHEDULER}.__init__",
            Kind.AFTER,
            get_ready,
            "ranks begin together",
        ),
        Hook(
            f"{SCHEDULER}.run_event_loop",
            Kind.AROUND,
            serve,
            "until here forwards were warm-ups without a peer",
        ),
        Hook(
            f"{RUNNER}.forward",
            Kind.AROUND,
            forward_of_role,
            "a step's forward: model ranks run the model, attention ranks serve its attention",
        ),
        Hook(
            f"{RUNNER}.init_attention_backends",
            Kind.AROUND,
            attend_elsewhere,
            "a model rank's attention runs on the attention ranks",
        ),
        Hook(
            f"{RUNNER}.init_attention_backends",
            Kind.AFTER,
            know_width,
            "metrics tell how many bytes a row takes, which the model's layers say",
        ),
    )
