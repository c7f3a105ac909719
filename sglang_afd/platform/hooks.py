"""What SGLang lacks on a CPU without sgl-kernel, given in plain PyTorch.

`HOOKS` replaces or wraps one function each; see also `sglang_afd.platform.settings`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_afd.platform import delta_net, speculation
from sglang_afd.platform.defaults import BIND, MAX_STATES, parse_cores
from sglang_afd.upstream.hooks import Hook, Kind


def bind_threads(*, local_omp_cpuid: str | list[int], dist_init_method: str | None = None) -> None:
    """Bind this rank to its cores: ``"0-1"``, ``"0,2"`` or a list of core numbers.

    Cores that this process may not use are left out; if none remains, the rank stays unbound.
    PyTorch gets a thread for each core, shared with the ranks that are bound to the same cores
    (more threads than cores wait for each other a scheduler's tick at a time), and no more than
    ``OMP_NUM_THREADS``.
    """
    usable = os.sched_getaffinity(0)
    field = local_omp_cpuid
    cores = set(parse_cores(field) if isinstance(field, str) else field) & usable
    if cores:
        os.sched_setaffinity(0, cores)
    fields = os.environ.get(BIND, "").split("|")
    threads = max(1, len(cores or usable) // max(1, fields.count(str(field))))
    limit = int(os.environ.get("OMP_NUM_THREADS") or threads)
    torch.set_num_threads(min(threads, limit))


def check_alignment(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Return `model_config` as it is, in place of padding its dimensions to `tp_size`.

    Raises:
        ValueError: attention heads or expert width do not divide by the ranks that shard them.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    heads, attn_tp = model_config.num_attention_heads, parallel.attn_tp_size
    if heads % attn_tp:
        raise ValueError(
            f"the model has {heads} attention heads, which attention TP {attn_tp} does not "
            f"divide; choose an attention TP that does"
        )
    width = getattr(model_config.hf_text_config, "moe_intermediate_size", None)
    if width is not None and width % parallel.moe_tp_size:
        raise ValueError(
            f"the model's experts are {width} wide, which {parallel.moe_tp_size} ranks that shard "
            f"each expert do not divide; choose a --tp-size that does, or raise --ep-size"
        )
    return model_config


def experts_with_absent_ids(
    original: Any, layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """SGLang's native experts, for ids that may be -1 (another rank's expert, or a padding row).

    Args:
        x: [rows, hidden]; rows may be 0.
        topk_output: ids and weights, [rows, top_k] each.

    Returns:
        [rows, hidden]; absent ids add nothing.
    """
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    present = ids >= 0
    if x.shape[0] and present.all():
        return original(layer, x, topk_output, moe_runner_config)
    rows, slots = present.nonzero(as_tuple=True)
    terms = weights.new_zeros((*ids.shape, x.shape[1]))
    if len(rows):
        chosen = ids[rows, slots, None]
        pairs = topk_output._replace(topk_ids=chosen, topk_weights=torch.ones_like(chosen).float())
        outputs = original(layer, x[rows], pairs, moe_runner_config)
        terms[rows, slots] = outputs.to(weights.dtype) * weights[rows, slots, None]
    return terms.sum(dim=1).to(x.dtype)


def reduce_scatterv(
    group: Any,
    input_: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """Sum `input_` over the ranks of `group` and keep this rank's rows (`sizes`: rows a rank)."""
    return group._deterministic_reduce_scatterv(input_, output, sizes)


def gather_flat(original: Any, group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """All-gather into a contiguous `output` of any shape that holds all ranks' `input` in order."""
    original(group, output.view(-1), input.reshape(-1))


def norm_over_heads(
    norm: Any, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norms of q and k, [rows, heads * head_dim], each over all heads of all attention-TP
    ranks."""
    from sglang.srt.layers.dp_attention import attn_tp_all_reduce

    ranks = norm._world_size
    squares = torch.stack([x.float().square().mean(-1) for x in (q, k)])
    if ranks > 1:
        squares = attn_tp_all_reduce(squares) / ranks
    scales = (squares + norm._eps).rsqrt()[..., None]
    weights = (norm._q_norm.weight, norm._k_norm.weight)
    q, k = (
        (x.float() * scale * weight.float()).to(x.dtype)
        for x, scale, weight in zip((q, k), scales, weights)
    )
    return q, k


def latent_attention(original: Any, *args: Any) -> Any:
    """How latent attention (MLA) runs on an attention backend, the last of `args`.

    PyTorch's own reads keys and values out of the pool, where only the latent ones are.
    """
    if args[-1] != "torch_native":
        return original(*args)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return lambda attention, batch: AttnForwardMethod.MLA


def unscaled_rotation(original: Any, *args: Any) -> Any:
    """SGLang's rotary embedding on a CPU, by the arguments of ``get_rope_cpu``; that of other
    devices where the sixth, how positions are scaled, is None."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    *given, scaling = args[:6]
    return get_rope(*given) if scaling is None else original(*args)


DELTA_NET: dict[str, Callable[..., Any]] = {
    "mamba.causal_conv1d_triton.causal_conv1d_fn": delta_net.convolve,
    "mamba.causal_conv1d_triton.causal_conv1d_update": delta_net.convolve_step,
    "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers": delta_net.keep_states,
    "attention.linear.fused_gdn_gating.fused_gdn_gating": delta_net.gates,
    "attention.fla.chunk.chunk_gated_delta_rule": delta_net.delta_rule,
    "attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode": (
        delta_net.delta_rule_step
    ),
    "attention.fla.layernorm_gated.RMSNorm.forward": delta_net.gated_norm,
    "elementwise.elementwise.fused_sigmoid_mul": delta_net.gate_output,
    "elementwise.elementwise.fused_gate_sigmoid_mul_add": delta_net.add_gated,
}
"""SGLang's Triton kernels of gated DeltaNet and of what is around it -> the same in PyTorch."""


def bound_states(configurator: Any, *_: Any) -> None:
    """Let linear attention keep `MAX_STATES` states a rank, unless their number was given."""
    from sglang.srt.runtime_context import get_context, get_schedule

    if get_schedule().max_mamba_cache_size is None:
        states = MAX_STATES * configurator.attn_dp_size  # SGLang shares them out
        get_context().override("sglang_afd", max_mamba_cache_size=states)


HOOKS: tuple[Hook, ...] = (
    *(
        Hook(f"sglang.kernels.ops.{target}", Kind.REPLACE, fn, "Qwen3.5 runs a Triton kernel")
        for target, fn in DELTA_NET.items()
    ),
    *speculation.HOOKS,
    Hook(
        "sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        Kind.REPLACE,
        bind_threads,
        "threads are bound by sgl-kernel, or not at all; ranks then fight for cores",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        Kind.BEFORE,
        bound_states,
        "each rank would take its share of the whole machine's free memory for states",
    ),
    Hook(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        Kind.REPLACE,
        check_alignment,
        "CPU mode pads model dimensions to the whole world, whose experts AFD never shards",
    ),
    Hook(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        Kind.AROUND,
        experts_with_absent_ids,
        "the native experts take neither id -1 nor zero rows",
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv",
        Kind.REPLACE,
        reduce_scatterv,
        "DP attention with EP returns rows through NCCL; an all-reduce over gloo does the same",
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.GroupCoordinator._all_gather_into_tensor",
        Kind.AROUND,
        gather_flat,
        "gloo, unlike NCCL, wants the output's shape to be the input's but for the first dimension",
    ),
    Hook(
        "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm._forward_naive",
        Kind.REPLACE,
        norm_over_heads,
        "MiniMax-M2 norms queries and keys with Triton kernels",
    ),
    Hook(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu",
        Kind.AROUND,
        unscaled_rotation,
        "on a CPU SGLang knows latent attention with YaRN alone",
    ),
    Hook(
        "sglang.srt.models.deepseek_common.attention_backend_handler"
        ".AttentionBackendRegistry.get_handler",
        Kind.AROUND,
        latent_attention,
        "SGLang treats an attention backend that it does not know as Triton's, which takes whole "
        "keys and values in prefill",
    ),
)
