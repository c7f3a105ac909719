"""Records what goes into and comes out of the experts, for requests that ask for it by their id.

For the validator, which starts servers with `RECORD_ENV` set; no other server has these hooks.  The
format is in `sglang_afd.observe.recording`.  Recorded are attention ranks (their remote experts),
and SGLang without AFD on one rank: on several, a rank's output is a part of a sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sglang_afd.config import AfdConfig
from sglang_afd.observe.recording import MAX_POSITION, number_of, write
from sglang_afd.upstream.expert_layers import RemoteExperts
from sglang_afd.upstream.hooks import Hook, Kind

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_files = itertools.count()
_taken: dict[str, torch.Tensor] | None = None
"""What the experts of the current forward gave so far; None: it is not recorded."""


def hooks(folder: Path) -> tuple[Hook, ...]:
    """Hooks of every rank of a server that records into `folder`."""

    def record(original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        numbers = None if runner.is_draft_worker else _numbers(batch)
        if numbers is None:
            return original(runner, batch, *args, **kw)
        positions = batch.positions[: len(numbers)].clone()
        with _taking() as taken:
            result = original(runner, batch, *args, **kw)
        _write(folder, torch.tensor(numbers), positions.cpu(), taken)
        return result

    return (
        Hook(
            f"{_RUNNER}.load_model",
            Kind.AFTER,
            _watch_experts,
            "the validator compares each MoE layer's output, to name where an error begins",
        ),
        Hook(
            f"{_RUNNER}.forward",
            Kind.AROUND,
            record,
            "rows belong to requests, and only those that ask for it are recorded",
        ),
    )


def _watch_experts(_: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    if runner.is_draft_worker:
        return
    for module in runner.model.modules():
        if isinstance(module, RemoteExperts | FusedMoE):
            # Experts may write their output over their input, which is therefore copied before.
            module.register_forward_pre_hook(_take_input, with_kwargs=True)
            module.register_forward_hook(_take_output)


def _take_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _taken is not None:
        hidden, topk = _arguments(*args, **kwargs)
        _taken[f"{module.layer_id}.input"] = hidden.clone()
        _taken[f"{module.layer_id}.experts"] = topk.topk_ids.clone()


def _arguments(hidden_states: torch.Tensor, topk_output: Any, **_: Any) -> tuple[Any, Any]:
    return hidden_states, topk_output


def _take_output(module: Any, args: Any, output: torch.Tensor) -> None:
    if _taken is not None:
        _taken[f"{module.layer_id}.output"] = output.clone()


@contextmanager
def _taking() -> Iterator[dict[str, torch.Tensor]]:
    """Let the experts give what they get and make, for the length of a forward."""
    global _taken
    _taken = {}
    try:
        yield _taken
    finally:
        _taken = None


def _numbers(forward_batch: Any) -> list[int] | None:
    """The number of each row's request, -1 where it is not recorded; None if none is."""
    of_request = [number_of(rid) for rid in forward_batch.rids or ()]
    if all(number is None for number in of_request):
        return None
    lengths = [1] * len(of_request)
    if forward_batch.forward_mode.is_extend():
        lengths = forward_batch.extend_seq_lens_cpu
    return [
        -1 if number is None else number
        for number, length in zip(of_request, lengths, strict=True)
        for _ in range(length)
    ]


def _write(
    folder: Path, numbers: torch.Tensor, positions: torch.Tensor, taken: dict[str, torch.Tensor]
) -> None:
    """Keep the rows of recorded requests that this rank had."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if not taken or (parallel.tp_size > 1 and AfdConfig.from_environment() is None):
        return
    tensors = _kept(numbers, positions, taken, parallel.attn_tp_rank)
    if tensors is not None:
        write(folder, f"rank{parallel.tp_rank}-{next(_files)}", tensors)


def _kept(
    numbers: torch.Tensor, positions: torch.Tensor, taken: dict[str, torch.Tensor], place: int
) -> dict[str, torch.Tensor] | None:
    """The rows to be written of those that the experts saw; None if there are none.

    Args:
        numbers: [n] request numbers of the batch's rows, -1 where a row is not recorded.
        positions: [n] places in their sequences.
        taken: [m, ...] what this rank's experts saw: with attention TP, which deals a batch's rows,
            padded, in equal parts, the part of the rank at `place`.
    """
    here = next(iter(taken.values())).shape[0]
    numbers = numbers[place * here : (place + 1) * here]
    positions = positions[place * here : (place + 1) * here]
    kept = ((numbers >= 0) & (positions < MAX_POSITION)).nonzero().flatten()
    if not len(kept):
        return None
    tensors = {name: tensor[: len(numbers)].cpu()[kept] for name, tensor in taken.items()}
    return {**tensors, "request": numbers[kept].int(), "position": positions[kept].int()}
