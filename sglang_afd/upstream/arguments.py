"""Server arguments: what counting F ranks as DP ranks would skew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_afd.config import AfdConfig
from sglang_afd.upstream.hooks import Hook, Kind

_DP_ATTENTION_CONSERVATIVENESS = 0.3  # the factor SGLang applies when attention DP is on


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of the process that resolves the server arguments."""
    attention, total = config.topology.leading_ranks, config.topology.dp_size

    def divide_over_attention_ranks(original: Callable[[Any], None], server_args: Any) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

        view = resolving_view(server_args)
        chunk = view.chunked_prefill_size
        scaled: dict[str, float] = {}
        if chunk is not None and chunk > 0:
            scaled["chunked_prefill_size"] = chunk // attention * total
        if attention == 1:
            scaled["schedule_conservativeness"] = (
                view.schedule_conservativeness / _DP_ATTENTION_CONSERVATIVENESS
            )
        if scaled:
            declare_resolution(server_args, "sglang_afd", **scaled)
        original(server_args)

    def check_unequal_commands(original: Callable[[Any], None], server_args: Any) -> None:
        from sglang.srt.arg_groups import validation_hook

        if config.command_role is None:
            original(server_args)
            return
        view = validation_hook.resolving_view
        validation_hook.resolving_view = lambda args: _OneNode(view(args))
        try:
            original(server_args)
        finally:
            validation_hook.resolving_view = view

    return (
        Hook(
            "sglang.srt.arg_groups.parallel_hook.handle_data_parallelism",
            Kind.AROUND,
            divide_over_attention_ranks,
            "the prefill chunk is divided over attention ranks only, as with A DP ranks",
        ),
        Hook(
            "sglang.srt.arg_groups.validation_hook.check_server_args",
            Kind.AROUND,
            check_unequal_commands,
            "the commands of a deployment need not start equally many ranks",
        ),
    )


class _OneNode:
    """A server-argument view whose world lies on one node."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return 1 if name == "nnodes" else getattr(self._view, name)
