"""A scheduler process becomes a rank: context, agreement, transport, the forward of its role."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sglang_afd.attention.empty_rounds import EmptyRounds
from sglang_afd.attention.exchange import AttentionExchange
from sglang_afd.config import AfdConfig, fingerprint
from sglang_afd.context import RankContext, current, enter
from sglang_afd.dispatch.step_plan import StepPlan
from sglang_afd.dispatch.transport import ExchangeError, RoutedRows, Transport
from sglang_afd.dispatch.turns import turns_of
from sglang_afd.families import family_of
from sglang_afd.ffn.graph import GraphServer
from sglang_afd.ffn.serve import serve_eagerly
from sglang_afd.identity import checkpoint_identity
from sglang_afd.topology import Mode, Role
from sglang_afd.transports import join
from sglang_afd.upstream import expert_layers, graphs
from sglang_afd.upstream.gather import gather
from sglang_afd.upstream.groups import make_attention_group
from sglang_afd.upstream.holdings import measure_buffers, measure_graphs
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.placement import placement_of
from sglang_afd.upstream.roles import on_ffn, on_serving
from sglang_afd.upstream.speculation import no_aux_rows

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"

_SCHEDULING = (
    # what both commands must be told alike; the random seed is rank 0's on every rank
    *("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "page_size"),
    *("disable_overlap_schedule", "enable_mixed_chunk", "schedule_policy"),
)
_SPECULATION = (
    *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk"),
    "speculative_num_draft_tokens",
)


def common_hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of a scheduler process in either mode."""

    def learn_rank(_: None, scheduler: Any) -> None:
        from sglang.srt.runtime_context import (
            get_memory,
            get_model,
            get_parallel,
            get_schedule,
            get_spec,
        )

        model, schedule, spec = scheduler.model_config, get_schedule(), get_spec()
        family = family_of(model.hf_config.architectures[0])
        facts = family.facts(model.hf_text_config)
        placement = placement_of(config, facts)
        agreement: dict[str, object] = {
            **config.agreement(),
            "experts lie": fingerprint({str(k): v for k, v in placement.layers.items()}),
            "model": f"{model.hf_config.architectures[0]} {facts}",
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            **checkpoint_identity(model.model_path, getattr(model.hf_config, "_commit_hash", None)),
            "load_format": str(get_model().load_format),
            "revision": model.revision,
            **{name: getattr(schedule, name) for name in _SCHEDULING},
            **{name: getattr(spec, name) for name in _SPECULATION},
            "disable_radix_cache": get_memory().disable_radix_cache,
            "sglang_afd": importlib.metadata.version("sglang_afd"),
        }
        rows = spec.speculative_num_draft_tokens if spec.speculative_algorithm else 1
        rank = get_parallel().tp_rank
        enter(
            RankContext(
                config,
                rank,
                family,
                facts,
                agreement,
                attention_layers=_attention_layers(config, model.hf_text_config),
                rows_per_request=rows,
                placement=placement,
            )
        )

    @on_serving
    def sample_nothing(runner: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=runner.device)

    @on_serving
    def no_graphs(runner: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.model_executor.model_runner_components import cuda_graph_setup

        # The one collective of all ranks inside what is left out here.
        cuda_graph_setup.refresh_deep_gemm_layout_memory_budget(runner)
        runner.eager_runner = runner.prefill_cuda_graph_runner = None
        runner.decode_cuda_graph_runner = None
        runner.graph_memory_usage, runner.graph_time_usage = {}, {}

    return (
        Hook(
            f"{SCHEDULER}.init_model_config",
            Kind.AFTER,
            learn_rank,
            "from here on the process knows its role and its model",
        ),
        Hook(
            f"{RUNNER}.sample",
            Kind.AROUND,
            sample_nothing,
            "ranks that serve have no logits to sample from",
        ),
        Hook(
            f"{RUNNER}.init_cuda_graphs",
            Kind.AROUND,
            no_graphs,
            "SGLang's graph runners capture a model forward, which ranks that serve have not",
        ),
    )


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of a scheduler process in AFD mode."""
    transport: Transport
    exchange: AttentionExchange
    serve_plan: Callable[[StepPlan], None]

    def connect(scheduler: Any) -> None:
        nonlocal transport, exchange
        from sglang.srt.runtime_context import get_parallel

        context = current()
        verify_agreement(context, get_parallel().tp_group.cpu_group)
        make_attention_group()
        group = get_parallel().tp_group.device_group
        transport = measure_buffers(
            lambda: join(
                context,
                dtype=scheduler.model_config.dtype,
                fp8=scheduler.model_config.quantization == "fp8",
                group=group,
            ),
            group,
        )
        context.caps = transport.caps
        with naming_peers():
            transport.load()
        if transport.stamps:
            from sglang_afd.observe.stamps import GraphStamps  # Triton is for GPUs

            layers = len(context.facts.layers)
            stamps = [GraphStamps(one, context.role, layers) for one in transport.stamps]
            context.timer.use(stamps)
        exchange = AttentionExchange(context, transport)
        if context.role is Role.ATTENTION and graphs.wanted(transport):
            exchange.take_turns(
                turns_of(context.role, config.lanes, "cuda", config.exchange_timeout)
            )
        expert_layers.connect(exchange)

    def load_kernels(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Compile the experts' kernels before a peer waits for them; A ranks meet F's here."""
        nonlocal serve_plan
        from torch.distributed import barrier

        context, runner = current(), scheduler.tp_worker.model_runner
        if context.role is Role.FFN:
            experts = runner.model.experts()
            for batch in transport.samples():
                experts[0](batch)
            if graphs.wanted(transport):
                turns = turns_of(context.role, config.lanes, "cuda", config.exchange_timeout)
                serve_plan = measure_graphs(
                    lambda: GraphServer(
                        experts, transport, context.timer, lanes=config.lanes, turns=turns
                    )
                ).serve
            else:
                serve_plan = partial(
                    serve_eagerly, layers=experts, transport=transport, timer=context.timer
                )
        elif graphs.wanted(transport):
            rows = no_rows(context, scheduler.model_config.dtype, runner.device)
            layers, lanes = len(context.facts.layers), range(config.lanes)
            exchange.use(
                measure_graphs(
                    lambda: [EmptyRounds(transport, layers, rows, lane) for lane in lanes]
                )
            )
        barrier(group=scheduler.tp_cpu_group)

    @contextmanager
    def naming_peers() -> Iterator[None]:
        """Say in an error which peer did not answer, if that is behind it."""
        try:
            yield
        except Exception as error:
            meaning = transport.failure(error)
            if meaning is None:
                raise
            raise ExchangeError(meaning) from error

    def serve(original: Callable[..., None], scheduler: Any) -> None:
        current().serving = True
        with naming_peers():
            original(scheduler)

    def forward_of_role(
        original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if runner.is_draft_worker:
            return original(runner, *args, **kwargs)
        if current().role is Role.FFN:
            with current().step() as plan:
                if plan is not None:
                    serve_plan(plan)
        elif not exchange.skips():
            with exchange.step():
                return original(runner, *args, **kwargs)
        return nothing_sampled(runner)

    def replay(runner: Any, *args: Any, **kwargs: Any) -> None:
        if not runner.model_runner.is_draft_worker:
            exchange.replayed()

    @on_ffn
    def no_attention_on_ffn(runner: Any, *args: Any, **kwargs: Any) -> None:
        runner.attn_backend = runner.decode_attn_backend = None

    return (
        *common_hooks(config),
        Hook(
            f"{SCHEDULER}.init_model_worker",
            Kind.BEFORE,
            connect,
            "all ranks agree on the configuration and join the transport before weights load",
        ),
        Hook(
            f"{SCHEDULER}.__init__",
            Kind.AFTER,
            load_kernels,
            "a first step that compiles kernels would outlast its peers' patience",
        ),
        Hook(
            f"{SCHEDULER}.run_event_loop",
            Kind.AROUND,
            serve,
            "until here forwards were warm-ups without a peer; a lost peer is named at its end",
        ),
        Hook(
            f"{RUNNER}.forward",
            Kind.AROUND,
            forward_of_role,
            "a step's forward: A exchanges rows by the plan, F serves them",
        ),
        Hook(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
            ".execute",
            Kind.BEFORE,
            replay,
            "a replayed forward exchanges without passing through Python: it is accounted for",
        ),
        Hook(
            f"{RUNNER}.init_attention_backends",
            Kind.AROUND,
            no_attention_on_ffn,
            "F ranks run no attention",
        ),
    )


def _attention_layers(config: AfdConfig, text_config: Any) -> tuple[int, ...]:
    """The layers whose attention is exchanged."""
    cad = config.mode is Mode.CAD
    return tuple(range(text_config.num_hidden_layers)) if cad else ()


def no_rows(context: RankContext, dtype: torch.dtype, device: str) -> RoutedRows:
    """No rows, in the form of the model's."""
    facts = context.facts
    return RoutedRows(
        torch.empty(0, facts.hidden_size, dtype=dtype, device=device),
        torch.empty(0, facts.top_k, dtype=torch.int32, device=device),
        torch.empty(0, facts.top_k, device=device),
    )


def verify_agreement(context: RankContext, group: Any) -> None:
    """Compare the configuration of all ranks before anything large is allocated.

    Raises:
        ConfigError: ranks differ; names the ranks and every differing field.
    """
    from sglang_afd.config import ConfigError, differences

    everyone = gather(context.agreement, dict[str, object], group)
    for rank, theirs in enumerate(everyone):
        differing = differences(everyone[context.rank], theirs)
        if differing:
            raise ConfigError(
                f"{context.name} and {context.topology.name_of(rank)} are configured differently: "
                f"{'; '.join(differing)}; start every command with the same flags and model"
            )


def nothing_sampled(runner: Any) -> Any:
    """What a forward of an idle rank returns: no rows, of logits and of what a draft reads."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    logits = torch.empty(0, runner.model_config.vocab_size, device=runner.device)
    output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=no_aux_rows(runner))
    return ModelRunnerOutput(output, can_run_graph=False)
