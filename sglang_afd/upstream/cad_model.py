"""CAD, model ranks: SGLang's own model with all its experts, and attention that is elsewhere."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from sglang_afd.cad.exchange import RemoteAttention
from sglang_afd.cad.experts import SharedExperts
from sglang_afd.cad.form import Form
from sglang_afd.cad.tables import StepTables
from sglang_afd.context import current
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.upstream import cad_states
from sglang_afd.upstream.expert_layers import run_rows
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.ranks import no_rows
from sglang_afd.upstream.roles import on_model
from sglang_afd.upstream.shadow import ALONE, parallel_view


def forms(model: torch.nn.Module) -> list[Form]:
    """What travels for every attention layer of a model, in the order in which it runs them."""
    return sorted(map(form_of, attention_layers(model)))


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """SGLang's attention layers of a model, full and linear, in the order in which it runs them."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    kinds = (RadixAttention, RadixLinearAttention)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    return sorted(layers, key=lambda layer: layer.layer_id)


def is_linear(layer: Any) -> bool:
    """Whether one of them is linear attention."""
    return not hasattr(layer, "tp_q_head_num")


def form_of(layer: Any) -> Form:
    """What travels for one of SGLang's attention layers."""
    if is_linear(layer):
        gates = layer.num_v_heads, layer.num_v_heads
        widths = layer.q_dim, layer.k_dim, layer.v_dim
        return Form(layer.layer_id, (*widths, *gates), layer.v_dim)
    queries = layer.tp_q_head_num * layer.qk_head_dim
    keys = layer.tp_k_head_num * layer.qk_head_dim
    values = layer.tp_v_head_num * layer.v_head_dim
    return Form(layer.layer_id, (queries, keys, values), layer.tp_q_head_num * layer.v_head_dim)


@cache
def backend_class() -> type:
    """The class of a model rank's attention backend."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class RemoteBackend(AttentionBackend):
        """SGLang's attention backend in name: attention ranks store and attend."""

        def __init__(self, runner: Any, exchange: RemoteAttention) -> None:
            super().__init__()
            self.req_to_token_pool = runner.req_to_token_pool
            self.token_to_kv_pool = runner.token_to_kv_pool
            self._page, self._exchange = runner.page_size, exchange

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Tell the attention ranks where the step's keys and values go and lie."""
            self._exchange.announce(self._tables(forward_batch))

        def forward(
            self,
            q: torch.Tensor | None = None,
            k: torch.Tensor | None = None,
            v: torch.Tensor | None = None,
            layer: Any = None,
            forward_batch: Any = None,
            save_kv_cache: bool = True,
            mixed_qkv: torch.Tensor | None = None,
            a: torch.Tensor | None = None,
            b: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            """SGLang's contract: [n, heads x width] queries -> [n, heads x width] outputs.

            Of linear attention [n, heads x widths] queries, keys and values side by side, and two
            gates of each head -> [1, n, heads, width].
            """
            asked = [name for name, value in kwargs.items() if value is not None]
            if is_linear(layer) and not asked:
                assert mixed_qkv is not None and a is not None and b is not None
                parts = mixed_qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=1)
                rows = [part.reshape(len(mixed_qkv), -1) for part in (*parts, a, b)]
                output = self._exchange(form_of(layer), rows)
                return output.view(1, -1, layer.num_v_heads, layer.head_v_dim)
            if not save_kv_cache or q is None or k is None or v is None or asked:
                raise RuntimeError(
                    f"layer {layer.layer_id} asks for attention that CAD does not serve "
                    f"({asked or 'keys that are not stored'})"
                )
            rows = [part.reshape(len(q), -1) for part in (q, k, v)]
            return self._exchange(form_of(layer), rows)

        def get_cpu_graph_seq_len_fill_value(self) -> int:
            """The length of a request that only pads a batch; SGLang asks, and AFD pads none."""
            return 1

        get_cuda_graph_seq_len_fill_value = get_cpu_graph_seq_len_fill_value

        def _tables(self, batch: Any) -> StepTables:
            extends = not batch.forward_mode.is_decode()
            new = batch.extend_seq_lens if extends else torch.ones_like(batch.seq_lens)
            longest = int(batch.seq_lens.max())
            table = self.req_to_token_pool.req_to_token[batch.req_pool_indices, :longest]
            return StepTables.of(
                extends,
                batch.seq_lens,
                new,
                batch.out_cache_loc,
                table,
                self._page,
                cad_states.tables_of(batch, self.req_to_token_pool),
            )

    return RemoteBackend


_shared: SharedExperts | None = None


def connect(shared: SharedExperts) -> None:
    """Give a model rank's experts the exchange with the other model ranks'."""
    global _shared
    _shared = shared


@cache
def experts_class() -> type:
    """The class of a model rank's experts: SGLang's layer, of the experts of this rank alone."""
    from sglang.srt.layers.moe.fused_moe_triton import layer as module
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    own = current().own_slots

    class OwnExperts(module.FusedMoE):
        """This rank's experts of a layer."""

        def __init__(self, **kwargs: Any) -> None:
            asked = {"num_experts": len(own), "uses_expert_location": False}
            if _shared is not None:
                asked |= {"no_combine": True, "inplace": False}
            with parallel_view(module, **ALONE):
                super().__init__(**{**kwargs, **asked})
            if _shared is not None:
                # SGLang's GPU kernels look for ids of -1 only where not all experts are here.
                self.moe_runner_config.num_experts = None

        def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
            return expert_id - own.start if expert_id in own else -1

        def run_shared(self, rows: RoutedRows) -> torch.Tensor:
            """Run this rank's rows through everybody's experts, and everybody's through its own."""
            assert _shared is not None
            return _shared(rows, partial(run_rows, self))

        def forward(self, hidden_states: torch.Tensor, topk_output: Any, **_: Any) -> torch.Tensor:
            """[n, H] rows and SGLang's top-k output -> [n, H] combined rows."""
            if _shared is not None:
                ids, weights = topk_output.topk_ids, topk_output.topk_weights
                return self.run_shared(RoutedRows(hidden_states, ids, weights))
            if not len(hidden_states):
                return hidden_states
            dispatched = StandardDispatchOutput(
                hidden_states=hidden_states, hidden_states_scale=None, topk_output=topk_output
            )
            return self.run_moe_core(dispatched).hidden_states

    return OwnExperts


def serve_experts(runner: Any) -> None:
    """Take part in a step in which this rank has no rows: the others' may be for its experts."""
    if _shared is None:
        return
    rows = no_rows(current(), runner.dtype, runner.device)
    layers: list[Any] = [m for m in runner.model.modules() if isinstance(m, experts_class())]
    for layer in sorted(layers, key=lambda layer: layer.layer_id):
        layer.run_shared(rows)


@on_model
def _experts_here(*args: Any, **kwargs: Any) -> type:
    return experts_class()


HOOKS = (
    Hook(
        "sglang.srt.layers.moe.ep_moe.layer.get_moe_impl_class",
        Kind.AROUND,
        _experts_here,
        "a model rank has experts as an FFN rank does, and is asked for them by its own model",
    ),
)
