"""What stands in for `sglang_afd.running.serve`: servers are worlds, which start in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from sglang_afd.running import Server, ServerFailed
from tests.support.world import World, Worlds

START = 300.0  # seconds; a world is up in 15, the rest is for a machine that others load


def serving(
    worlds: Worlds, more: Callable[[str], Mapping[str, str]] = lambda name: {}
) -> Callable[..., AbstractContextManager[Server]]:
    """`serve` by `worlds`; ``more(name)`` is added to the environment of the server `name`."""

    @contextmanager
    def serve(
        name: str,
        args: Sequence[str],
        *,
        logs: Path,
        environment: dict[str, str] | None = None,
        **_: Any,
    ) -> Iterator[Server]:
        world: World = worlds.start(args, env={**(environment or {}), **more(name)})
        try:
            try:
                world.wait_healthy(START)
            except AssertionError as error:
                raise ServerFailed(str(error)) from error
            yield Server(name, world.port, 0.0, world.log_path)
        finally:
            world.kill()

    return serve
