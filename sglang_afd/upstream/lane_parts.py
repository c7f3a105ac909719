"""What each lane of a rank has of its own on a GPU, so that lanes may run beside one another.

SGLang has one of each of these, for its steps run one after the other on one stream: the streams
that a forward and the copy of its result run on; the attention backend, which keeps the metadata of
its last batch; the graphs, with the buffers they read and write; the memory pool they were recorded
in; and the stream they were recorded on, to which cuBLAS ties its workspace.  Two steps at once
would write into one another's.

SGLang's own go to the first lane, its own forward stream to the prefill lane: the decode lanes'
streams come before it where both have blocks to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sglang_afd.config import ConfigError
from sglang_afd.context import RankContext
from sglang_afd.upstream.shadow import replaced

BACKENDS = ("fa3", "triton")
"""Attention backends whose instances share no workspace."""

_RUNNER = (
    *("attn_backend", "decode_attn_backend", "eager_runner", "prefill_cuda_graph_runner"),
    "decode_cuda_graph_runner",
)
_CAPTURE_STREAM = "cuda_graph_capture"  # SGLang's name for it


class LaneParts(NamedTuple):
    """What stands in the place of SGLang's one of each in a lane's turn, by attribute."""

    scheduler: dict[str, Any]
    runner: dict[str, Any]

    @contextmanager
    def in_place(self, scheduler: Any) -> Iterator[None]:
        """Within the block the scheduler and its model runner have the lane's."""
        runner = scheduler.tp_worker.model_runner
        with replaced(scheduler, **self.scheduler), replaced(runner, **self.runner):
            yield


def runner_parts(runner: Any, context: RankContext) -> list[dict[str, Any]]:
    """Make what an A rank's model runner has for each decode lane, then for the prefill lane.

    Args:
        runner: SGLang's, with its graphs recorded if it decodes with graphs.

    Raises:
        ConfigError: an attention backend, or the environment, makes lanes share memory.
    """
    from sglang.srt.model_executor.runner_utils.pool import graph_pool_borrow_enabled

    lanes = context.config.lanes
    for name in (runner.prefill_attention_backend_str, runner.decode_attention_backend_str):
        if name not in BACKENDS:
            raise ConfigError(
                f"--afd-lanes {lanes} needs an attention backend whose instances share no "
                f"workspace ({', '.join(BACKENDS)}), and {name} is none that is known to be; use "
                f"--attention-backend {BACKENDS[0]} or --afd-lanes 1"
            )
    if graph_pool_borrow_enabled():
        raise ConfigError(
            f"--afd-lanes {lanes} does not go with SGLANG_ENABLE_GRAPH_POOL_BORROW: a lane would "
            f"take memory that another lane's graph is using; unset it"
        )
    parts = [{name: getattr(runner, name) for name in _RUNNER}]
    usage = dict(runner.graph_memory_usage)
    for lane in range(1, lanes + 1):
        context.lane = lane
        with replaced(runner, **parts[0]), _apart(runner):
            for phase, size in _make(runner, decodes=lane < lanes).items():
                usage[phase] = usage.get(phase, 0) + size
            parts.append({name: getattr(runner, name) for name in _RUNNER})
    context.lane = 0
    runner.graph_memory_usage = usage
    return parts


def _make(runner: Any, *, decodes: bool) -> dict[str, float]:
    """Give `runner` another backend and other runners; returns what the graphs take, in GiB."""
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        build_attention_backends,
    )
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import (
        capture_decode_graph,
    )
    from sglang.srt.model_executor.runner import EagerRunner

    backends = build_attention_backends(model_runner=runner)
    runner.attn_backend = backends.attn_backend
    runner.decode_attn_backend = backends.decode_attn_backend
    runner.kv_index_translator.bind_and_verify_backends(
        [runner.attn_backend, runner.decode_attn_backend]
    )
    runner.eager_runner = EagerRunner(runner, run_warmup=False)
    runner.prefill_cuda_graph_runner = runner.eager_runner
    runner.decode_cuda_graph_runner = None
    if not decodes:
        return {}
    capture = capture_decode_graph(model_runner=runner)
    runner.decode_cuda_graph_runner = capture.runner
    return capture.memory_usage


@contextmanager
def _apart(runner: Any) -> Iterator[None]:
    """What is made within the block shares nothing with what was made before."""
    from sglang.srt.model_executor import input_buffers
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.runner_utils import pool
    from sglang.srt.runtime_context import set_stream

    stream = pool.get_or_create_global_graph_capture_stream()
    memory = pool.get_global_graph_memory_pool()
    set_stream(_CAPTURE_STREAM, torch.cuda.Stream(priority=-1))
    pool.set_global_graph_memory_pool(None)
    try:
        with (
            replaced(input_buffers, _forward_input_buffer_pool={}),
            replaced(GraphSharedOutput, _process_shared=None),
        ):
            shared = GraphSharedOutput.create_for_model_runner(runner)
            with replaced(runner, graph_shared_output=shared):
                yield
    finally:
        set_stream(_CAPTURE_STREAM, stream)
        pool.set_global_graph_memory_pool(memory)


def scheduler_parts(scheduler: Any, lane: int, context: RankContext) -> dict[str, Any]:
    """Make what a rank's scheduler has for a lane: streams, on a GPU; the prefill lane's are its
    own."""
    if torch.device(scheduler.device).type != "cuda" or lane == context.config.lanes:
        return {}
    # of a priority of its own, so that it is none of the streams that SGLang draws
    forward, copy = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
    return {
        "forward_stream": forward,
        "forward_stream_ctx": scheduler.device_module.stream(forward),
        "copy_stream": copy,
        "copy_stream_ctx": scheduler.device_module.stream(copy),
    }
