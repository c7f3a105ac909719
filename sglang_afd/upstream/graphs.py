"""CUDA graphs of both roles: A ranks capture SGLang's decode graphs among themselves."""

from __future__ import annotations

import os
from typing import Any

from sglang_afd.dispatch.transport import Transport
from sglang_afd.upstream.groups import attention_group
from sglang_afd.upstream.hooks import Hook, Kind

LAUNCH_QUEUES = 32
"""Streams that wait for one another must not share one of the device's launch queues."""


def wanted(transport: Transport) -> bool:
    """Whether this deployment decodes with graphs."""
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )

    return transport.graphs and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


class _AmongAttentionRanks:
    """The group that a capturing rank meets before every graph: F ranks capture their own."""

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=attention_group())


def _meet_attention_ranks(_: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    backend._tp_group = _AmongAttentionRanks()


def _more_launch_queues(_: None, *args: Any, **kwargs: Any) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(LAUNCH_QUEUES)


def _leave_dispatch_mode(adapter: Any, *args: Any, **kwargs: Any) -> None:
    """A ranks have no DeepEP buffer of SGLang's, whose mode the graphs could ask for."""


_ADAPTER = "sglang.srt.model_executor.runner_utils.deepep_adapter.DeepEPCudaGraphRunnerAdapter"

HOOKS = (
    Hook(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
        ".__init__",
        Kind.AFTER,
        _meet_attention_ranks,
        "A ranks capture the model's graphs, F ranks are not there",
    ),
    Hook(
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        Kind.AFTER,
        _more_launch_queues,
        "SGLang allows 8 launch queues, which the streams of a rank would share",
    ),
    *(
        Hook(
            f"{_ADAPTER}.{name}",
            Kind.REPLACE,
            _leave_dispatch_mode,
            "a draft's graphs switch the mode of SGLang's DeepEP buffer, which no rank has",
        )
        for name in ("capture", "replay")
    ),
)
