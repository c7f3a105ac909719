"""Worlds, one after the other: each is started, found healthy, and seen to end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import aiohttp

from sglang_afd.causes import INTERRUPTED
from sglang_afd.running import end_with_parent, free_port

LOOPBACK = "127.0.0.1"
_FINAL = (0, 2, INTERRUPTED)
"""Statuses of a world that another start would not mend: ended as asked, refused, Ctrl-C."""
_POLL = 0.5  # seconds between looks whether a world is up
_SIGNALLED = 128  # a shell's status of a process that a signal has ended: this and its number


class Process(Protocol):
    """What is used of ``asyncio.subprocess.Process``."""

    async def wait(self) -> int:
        """Its status (negative: the signal that ended it)."""

    def send_signal(self, signal: int) -> None:
        """Send it a signal."""


async def start(argv: Sequence[str]) -> Process:
    """Start ``launch_server`` with `argv`: not in this process's group, whose Ctrl-C is for the
    front to pass on, and ended with this process."""

    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_afd.launch_server", *argv),
        process_group=0,
        preexec_fn=end_with_parent,
    )


class World:
    """One start of the server behind the front."""

    def __init__(self) -> None:
        self.url: str | None = None
        """Where it serves, once it is up."""
        self.settled = asyncio.Event()
        """It is up, or has ended before it was."""
        self.ended = asyncio.Event()


class Worlds:
    """The world of the moment, and those before it."""

    def __init__(self, argv: Sequence[str], restarts: int, say: Callable[[str], None]) -> None:
        self._argv, self._restarts, self._say = argv, restarts, say
        self._process: Process | None = None
        self._stopping = False
        self.over = False
        """No world follows the last."""
        self.current = World()

    @property
    def up(self) -> bool:
        """Whether the world of the moment serves."""
        return self.current.url is not None and not self.current.ended.is_set()

    async def run(self) -> int:
        """Start worlds until one ends that no other may follow; the command's status."""
        restarted, was_up = 0, False
        while True:
            status = await self._one()
            was_up = was_up or self.current.url is not None
            last = self._stopping or status in _FINAL or not was_up or restarted == self._restarts
            ended, self.over = self.current, last
            if not last:
                restarted += 1
                self.current = World()
            ended.settled.set()
            ended.ended.set()
            if last:
                return status if status >= 0 else _SIGNALLED - status
            self._say(
                f"the deployment ended with {status}; it is started again ({restarted} of "
                f"{self._restarts} times); requests wait"
            )

    def stop(self, sign: signal.Signals) -> None:
        """Pass a signal on that ends the world; no other follows."""
        self._stopping = True
        if self._process is not None and not self.current.ended.is_set():
            self._process.send_signal(sign)

    async def _one(self) -> int:
        port = free_port()
        address = ["--host", LOOPBACK, "--port", str(port)]
        self._process = await start([*self._argv, *address])
        if self._stopping:
            self._process.send_signal(signal.SIGTERM)
        watching = asyncio.create_task(_until_healthy(self.current, f"http://{LOOPBACK}:{port}"))
        try:
            return await self._process.wait()
        finally:
            watching.cancel()


async def _until_healthy(world: World, url: str) -> None:
    """Wait until the world serves; whoever starts it bounds this by its end."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as session:
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        world.url = url
                        world.settled.set()
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(_POLL)
