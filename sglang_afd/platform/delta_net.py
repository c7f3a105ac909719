"""Gated DeltaNet (Qwen3.5's linear attention) in plain PyTorch, called as SGLang's kernels are.

A request's states lie in a slot of SGLang's pools: the last inputs of the convolution, and a matrix
of each value head, [V, K], kept in float32 here whatever the pool's own type.  A slot below zero is
a row of padding: it gives zeros and moves no state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

CHUNK = 64
"""SGLang's: a cached prefix ends where a chunk of its request does."""
_NORM_EPSILON = 1e-6
_SILU = ("silu", "swish")


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    *,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Causal convolution of the sequences of a prefill, each continuing from its slot's state.

    Args:
        x: [channels, tokens], one sequence after another; weight: [channels, width].
        conv_states: [slots, channels, width - 1]; left with each sequence's last inputs.
        query_start_loc: where each sequence starts, and the end, [sequences + 1]; `seq_lens_cpu`
            says the same.
        cache_indices: the slots, [sequences]; has_initial_state: whether the state there is of this
            request, [sequences].

    Returns:
        [channels, tokens]; zeros past the last sequence.
    """
    out = torch.zeros_like(x)
    ends = query_start_loc.tolist()
    for start, end, slot, old in zip(
        ends, ends[1:], cache_indices.tolist(), has_initial_state.tolist()
    ):
        if slot < 0 or start == end:
            continue
        state = conv_states[slot]
        before = state if old else torch.zeros_like(state)
        inputs = torch.cat([before.to(x.dtype), x[:, start:end]], dim=1)
        out[:, start:end] = _activated(
            functional.conv1d(inputs[None], weight[:, None], bias, groups=len(x))[0], activation
        )
        state.copy_(inputs[:, -state.shape[1] :])
    return out


def convolve_step(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """The same for one more token of each request: x [requests, channels]."""
    out = torch.zeros_like(x)
    rows = (conv_state_indices >= 0).nonzero().flatten()
    slots = conv_state_indices[rows].long()
    inputs = torch.cat([conv_state[slots].to(x.dtype), x[rows, :, None]], dim=2)
    sums = (inputs * weight).sum(dim=2)
    out[rows] = _activated(sums if bias is None else sums + bias, activation)
    conv_state[slots] = inputs[:, :, 1:].to(conv_state.dtype)
    return out


def gates(
    log_rate: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log of the decay, and the learning rate, [1, tokens, heads] each, in float32.

    Args:
        a, b: their projections, [tokens, heads]; log_rate, bias: [heads].
    """
    decay = -log_rate.float().exp() * functional.softplus(a.float() + bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    inplace_update: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The gated delta rule over the sequences of a prefill, token by token.

    Args:
        q, k: [1, tokens, key heads, K], not normalised; v: [1, tokens, value heads, V].
        g, beta: what `gates` returns.
        initial_state: [slots, value heads, V, K]; left with the sequences' last states unless
            `inplace_update` is False.
        initial_state_indices: the slots, [sequences]; cu_seqlens: see `query_start_loc` above.

    Returns:
        Outputs, [1, tokens, value heads, V]; nothing; the states before each chunk of each
        sequence, [1, chunks, value heads, V, K].
    """
    query, key = _unit_keys(q[0], k[0], heads=v.shape[2])
    value, decay, rate = v[0].float(), g[0].exp(), beta[0]
    out, before = torch.zeros_like(value), []
    ends = cu_seqlens.tolist()
    for start, end, slot in zip(ends, ends[1:], initial_state_indices.tolist()):
        state = initial_state[max(slot, 0)].float().clone()  # the pool changes under a view
        for index in range(start, end):
            if (index - start) % CHUNK == 0:
                before.append(state)
            if slot >= 0:
                state, out[index] = _step(
                    state, query[index], key[index], value[index], decay[index], rate[index]
                )
        if slot >= 0 and inplace_update:
            initial_state[slot] = state.to(initial_state.dtype)
    chunks = torch.stack(before) if before else initial_state[:0].float()
    return out.to(v.dtype)[None], None, chunks[None]


def delta_rule_step(
    *,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for one more token of each request.

    Args:
        mixed_qkv: queries, keys and values of all heads, [requests, channels].
        a, b, A_log, dt_bias: see `gates`; [requests, heads] and [heads].
        initial_state: [slots, heads, V, K]; out: [requests, 1, heads, V], written here.
        ssm_state_indices: the slots, [requests].

    Returns:
        `out` and `initial_state`.
    """
    heads, value_size, key_size = initial_state.shape[1:]
    keys = (mixed_qkv.shape[1] - heads * value_size) // 2
    out.zero_()
    rows = (ssm_state_indices >= 0).nonzero().flatten()
    slots = ssm_state_indices[rows].long()
    q, k, v = mixed_qkv[rows].split([keys, keys, heads * value_size], dim=1)
    query, key = _unit_keys(
        q.unflatten(1, (-1, key_size)), k.unflatten(1, (-1, key_size)), heads=heads
    )
    decay, rate = gates(A_log, a[rows], b[rows], dt_bias)
    state, result = _step(
        initial_state[slots].float(),
        query,
        key,
        v.unflatten(1, (heads, value_size)).float(),
        decay[0].exp(),
        rate[0],
    )
    initial_state[slots] = state.to(initial_state.dtype)
    out[rows, 0] = result.to(out.dtype)
    return out, initial_state


def gated_norm(norm: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """RMS norm of `x`, then gated by `z`, [rows, V] both, as SGLang's module `norm` says."""
    kept = x.float()
    kept = kept * (kept.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.float()
    gate = z.float()
    gate = functional.silu(gate) if norm.activation in _SILU else gate.sigmoid()
    return (kept * gate).to(x.dtype)


def gate_output(x: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """`x`, [rows, heads * size], times the sigmoid of `gate`, which may be [rows, heads, size]."""
    gate = gate.reshape(x.shape).sigmoid()
    return x.mul_(gate) if inplace else x * gate


def add_gated(
    hidden: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor
) -> None:
    """Add to `routed` the shared expert's output, both [rows, hidden], gated by its input."""
    routed += (hidden.float() @ gate_weight.float()).sigmoid()[:, None] * shared


def keep_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of the requests in the mask to other slots, in all layers.

    Args:
        conv_states, ssm_states: [layers, slots, ...]; cache_indices: from where, [requests];
            mamba_track_indices: to where, [requests].
    """
    wanted = mamba_track_mask[:batch_size].bool()
    source, target = cache_indices[:batch_size], mamba_track_indices[:batch_size]
    wanted = wanted & (source >= 0) & (target >= 0)
    for states in (conv_states, ssm_states):
        states[:, target[wanted].long()] = states[:, source[wanted].long()]


def _activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    return functional.silu(x) if activation in _SILU else x


def _unit_keys(
    q: torch.Tensor, k: torch.Tensor, *, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, key heads, K] -> scaled queries and unit keys of each value head, [rows, heads, K]."""
    q, k = (
        x * (x.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()
        for x in (q.float(), k.float())
    )
    times = heads // q.shape[1]
    return (q * q.shape[2] ** -0.5).repeat_interleave(times, 1), k.repeat_interleave(times, 1)


def _step(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: state [..., heads, V, K], query and key [..., heads, K], value [..., heads, V],
    decay and rate [..., heads] -> the next state, and what the query reads of it."""
    state = state * decay[..., None, None]
    wrong = (value - (state @ key[..., None])[..., 0]) * rate[..., None]
    state = state + wrong[..., None] * key[..., None, :]
    return state, (state @ query[..., None])[..., 0]
