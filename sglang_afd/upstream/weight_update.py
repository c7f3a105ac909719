"""New weights from the disk in a running deployment: on every rank of both roles, or on none.

SGLang's own update reaches every rank, and each reads its role's tensors through the same iterators
as in the start.  What is added: the new checkpoint is looked at before any rank reads it, and the
ranks agree on how it went, so that no half of the model answers with the other's old half.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sglang_afd import weight_update
from sglang_afd.checkpoint import Checkpoint, read_checkpoint
from sglang_afd.config import AfdConfig, fingerprint
from sglang_afd.context import current
from sglang_afd.identity import checkpoint_identity
from sglang_afd.upstream.expert_layers import choose_anew
from sglang_afd.upstream.hooks import Hook, Kind

logger = logging.getLogger(__name__)

PLACEMENT = "afd_experts"
"""In the manifest of an update, which SGLang hands on and does not read: where experts are to
lie."""
UNDER_WAY = "another update of the weights or of the experts' places is under way; ask again later"

_updates: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()
_placements: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()
_placing: ContextVar[bool] = ContextVar("placing", default=False)


def hooks(config: AfdConfig) -> tuple[Hook, ...]:
    """Hooks of the process that takes requests, and of the ranks."""

    async def look_first(
        original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if _placing.get():
            return await original(manager, obj, *args, **kwargs)
        lock = updating(manager)
        if PLACEMENT in (obj.manifest or {}):
            why: str | None = f"{PLACEMENT} is AFD's own; place experts by POST /afd/experts"
        elif lock.locked():  # SGLang would answer one of the two, and hang the other
            why = UNDER_WAY
        else:
            async with lock:
                why = await asyncio.to_thread(_refusal, manager, obj)  # reads all files' headers
                if why is None:
                    return await original(manager, obj, *args, **kwargs)
        return False, f"AFD refuses /update_weights_from_disk: {why}", 0

    async def after_a_placement(
        original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if _placing.get():
            return await original(manager, *args, **kwargs)
        async with _lock(_placements, manager):
            return await original(manager, *args, **kwargs)

    serves: dict[str, object] = {}

    def update_everywhere(
        original: Callable[..., Any], updater: Any, model_path: str, load_format: str, **rest: Any
    ) -> tuple[bool, str]:
        context, before = current(), updater.model_config.model_path
        placed, context.placed = context.placed, context.next_placement or context.placed
        _let_the_device_end()  # steps that were launched before, with the weights of then
        identity, message, has_read = None, "", True
        if context.next_placement is None:
            identity, message = _tried(original, updater, model_path, load_format, **rest)
        elif _changed(before, serves or context.agreement):
            message, has_read = f"{before} is not what it was when its weights were read", False
        else:  # each rank's own path: two commands may have different ones
            identity, message = _tried(original, updater, before, load_format, **rest)
        with waiting_as_in_the_start():
            wrong = _disagreement(identity, model_path)
            if not wrong:
                choose_anew(updater.get_model())
                _let_the_device_end()  # F's lanes have streams that wait for none of this
                serves.update(checkpoint_identity(updater.model_config.model_path))
                return True, message
            context.placed = placed
            restored: int | None = 0
            why = ""
            if has_read:
                restored, why = _tried(original, updater, before, load_format, **rest)
            if restored is None:
                raise RuntimeError(
                    f"{context.name} can neither take the weights of {model_path} ({message}) "
                    f"nor those of {before} again ({why}); restart the deployment"
                )
            _let_the_device_end()
            torch.distributed.barrier(group=_group())
        own = f" {context.name}: {message}" if identity is None else ""
        return False, f"{wrong}; every rank has the weights again that it had before.{own}"

    @contextmanager
    def waiting_as_in_the_start() -> Iterator[None]:
        """Let ranks that read less wait for those that read more, as long as in the start."""
        group = _group()._get_backend(torch.device("cpu"))
        group._set_default_timeout(timedelta(seconds=config.startup_timeout))
        try:
            yield
        finally:
            group._set_default_timeout(timedelta(seconds=config.exchange_timeout))

    return (
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
            Kind.AROUND,
            look_first,
            "a checkpoint of another model, or one with tensors missing, must reach no rank",
        ),
        *(
            Hook(
                f"sglang.srt.managers.tokenizer_manager.TokenizerManager.{name}_generation",
                Kind.AROUND,
                after_a_placement,
                "placing experts pauses and continues by itself, and must undo no one's pause",
            )
            for name in ("pause", "continue")
        ),
        Hook(
            "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
            ".update_weights_from_disk",
            Kind.AROUND,
            update_everywhere,
            "a rank that could not read its tensors would leave a model of two halves",
        ),
    )


def _let_the_device_end() -> None:
    """A rank's device works with its own weights alone, so none needs to wait for another's."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def updating(manager: Any) -> asyncio.Lock:
    """Held while weights or places of experts change: SGLang can tell one answer from another of
    only one change at a time."""
    return _lock(_updates, manager)


@asynccontextmanager
async def placing(manager: Any) -> AsyncIterator[None]:
    """Within the block this task may pause, update and continue; others' pauses wait."""
    async with _lock(_placements, manager):
        token = _placing.set(True)
        try:
            yield
        finally:
            _placing.reset(token)


def _lock(locks: WeakKeyDictionary[Any, asyncio.Lock], manager: Any) -> asyncio.Lock:
    if manager not in locks:
        locks[manager] = asyncio.Lock()
    return locks[manager]


def _changed(path: str, known: Mapping[str, object]) -> bool:
    """Whether the checkpoint at `path` is another than the one that is `known`."""
    found = checkpoint_identity(path)
    named = "checkpoint" in found  # a repository's name, whose commit is not looked up again
    return not named and any(known.get(name, value) != value for name, value in found.items())


def _refusal(manager: Any, obj: Any) -> str | None:
    """Why the update that `obj` asks for is not begun; None: it is."""
    if manager.server_args.speculative_algorithm:
        return "the draft is made for the weights that run; restart the deployment with both"
    if obj.recapture_cuda_graph:
        return "weights change in place, and graphs stay right; leave recapture_cuda_graph out"
    path = manager.config_value("model_path")
    if obj.model_path != path and not os.path.isdir(obj.model_path):  # no download while it serves
        return f"there is no directory {obj.model_path} here; give one that every host has"
    served = checkpoint_at(manager, path)
    load_format = obj.load_format or manager.config_value("load_format")
    found = weight_update.refusals(served, checkpoint_at(manager, obj.model_path), load_format)
    return next((f"{refusal.message}; {refusal.mend}" for refusal in found), None)


def checkpoint_at(manager: Any, path: str) -> Checkpoint:
    """What the checkpoint at `path` says of itself, as the server that `manager` is of reads it."""
    overrides = manager.server_args.json_model_override_args
    return read_checkpoint(["--model-path", path, "--json-model-override-args", overrides])


def _tried(
    original: Callable[..., Any], updater: Any, path: str, *args: Any, **kwargs: Any
) -> tuple[int | None, str]:
    """Run SGLang's update: what identifies the checkpoint (None: it failed), and the message.

    SGLang raises where its own way back fails, which reads the new path again.
    """
    try:
        identity = fingerprint(checkpoint_identity(path))
        success, message = original(updater, path, *args, **kwargs)
    except Exception as error:
        logger.exception("%s could not take the weights of %s", current().name, path)
        return None, str(error)
    return identity if success else None, message


def _disagreement(identity: int | None, path: str) -> str:
    """Which ranks could not read the checkpoint, or read another than rank 0; empty: none."""
    mine = torch.tensor([-1 if identity is None else identity])
    gathered = [torch.empty_like(mine) for _ in range(current().topology.world_size)]
    torch.distributed.all_gather(gathered, mine, group=_group())
    everyone = [int(one) for one in gathered]
    name = current().topology.name_of
    if failed := [name(rank) for rank, read in enumerate(everyone) if read < 0]:
        return f"{', '.join(failed)} could not take the weights of {path}"
    others = [name(rank) for rank, read in enumerate(everyone) if read != everyone[0]]
    return f"{', '.join(others)} found another checkpoint at {path} than rank 0" if others else ""


def _group() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group.cpu_group
