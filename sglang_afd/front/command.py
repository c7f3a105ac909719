"""Run the front until its last world has ended."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
from aiohttp import web

from sglang_afd.front.proxy import Proxy
from sglang_afd.front.settings import Settings
from sglang_afd.front.worlds import Worlds
from sglang_afd.start import fail

_TO_ANSWER = 10.0
"""Seconds that answers may take to reach their clients after the last world's end."""


def run(settings: Settings, *, program: str) -> int:
    """Serve until the end; the status, which is the last world's.

    Exits with status 2 if the port cannot be had.
    """
    return asyncio.run(_run(settings, program))


async def _run(settings: Settings, program: str) -> int:
    def say(text: str) -> None:
        print(f"{program}: {text}", flush=True)

    worlds = Worlds(settings.world, settings.restarts, say)
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, worlds.stop, sign)
    unbounded = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        timeout=unbounded, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
    ) as session:
        app = web.Application(client_max_size=0)  # SGLang has no limit either
        app.router.add_route("*", "/{path:.*}", Proxy(worlds, session, retry=settings.retry).handle)
        # A client that hangs up takes its request along.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            try:
                await web.TCPSite(
                    runner, settings.host, settings.port, shutdown_timeout=_TO_ANSWER
                ).start()
            except OSError as error:
                fail(
                    program,
                    f"port {settings.port} of {settings.host} cannot be used "
                    f"({error.strerror or error}); choose another --port",
                )
            return await worlds.run()
        finally:
            await runner.cleanup()
