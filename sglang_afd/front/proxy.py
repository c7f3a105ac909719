"""The HTTP side of the front: requests go to the world of the moment, or wait for the next."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

import aiohttp
from aiohttp import web

from sglang_afd.causes import REQUEST_LOST
from sglang_afd.front.worlds import World, Worlds

_HEALTH = ("/health", "/health_generate", "/ready")
_RETRIED = ("/generate", "/v1/completions", "/v1/chat/completions")
"""Endpoints that change nothing: what they did in a world that died, the next can do again."""
_ATTEMPTS = 2
"""Of one request at most: it may be what the worlds die of."""
_GONE_WITHIN = 30.0
"""Seconds that a world whose connection broke may take to end; else it was the connection alone."""
_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length"),
}
"""Headers of a connection, not of a request or answer."""
_STREAM = "text/event-stream"


class Lost(Exception):
    """The world has died before an answer was whole, and nothing of it was passed on."""


class Whole(NamedTuple):
    """A request as it came."""

    request: web.Request
    body: bytes


class Proxy:
    """The front's HTTP application."""

    def __init__(self, worlds: Worlds, session: aiohttp.ClientSession, *, retry: bool) -> None:
        self._worlds, self._session, self._retry = worlds, session, retry

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        if request.path in _HEALTH and not self._worlds.up:
            return _failed("the deployment is not up")
        asked = Whole(request, await request.read())
        attempts = _ATTEMPTS if self._retry and request.path in _RETRIED else 1
        for _ in range(attempts):
            world = await self._next_world()
            if world is None:
                return _failed(REQUEST_LOST)
            try:
                return await self._ask(world, asked)
            except Lost:
                try:
                    await asyncio.wait_for(world.ended.wait(), _GONE_WITHIN)
                except TimeoutError:
                    return _failed("the connection to the deployment broke", status=502)
        return _failed(REQUEST_LOST)

    async def _next_world(self) -> World | None:
        """The world that is up, waiting for it; None: there is none any more."""
        while not self._worlds.over:
            world = self._worlds.current
            await world.settled.wait()
            if self._worlds.up:
                return self._worlds.current
            if world is self._worlds.current and not self._worlds.over:
                await world.ended.wait()
        return None

    async def _ask(self, world: World, asked: Whole) -> web.StreamResponse:
        request = asked.request
        try:
            async with self._session.request(
                request.method,
                f"{world.url}{request.raw_path}",
                headers=[(k, v) for k, v in request.headers.items() if k.lower() not in _HOP],
                data=asked.body or None,
                allow_redirects=False,
            ) as answer:
                headers = [(k, v) for k, v in answer.headers.items() if k.lower() not in _HOP]
                if answer.content_type == _STREAM:
                    return await self._stream(request, answer, headers)
                body = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            if request.transport is None or request.transport.is_closing():
                raise  # it is the client that has hung up
            raise Lost from error
        if answer.status == 503 and REQUEST_LOST.encode() in body:
            raise Lost
        return web.Response(status=answer.status, body=body, headers=headers)

    async def _stream(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        headers: list[tuple[str, str]],
    ) -> web.StreamResponse:
        """Pass a stream on as it comes; what it says of its end, the world says itself.

        Raises:
            Lost: it has ended so before anything was passed on.
        """
        out = web.StreamResponse(status=answer.status, headers=headers)
        chunks = answer.content.iter_any()
        broken = False
        while not broken:
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                break
            except (aiohttp.ClientError, OSError):
                broken, chunk = True, b"data: " + _error(REQUEST_LOST) + b"\n\n"
            if not out.prepared:
                if REQUEST_LOST.encode() in chunk:
                    raise Lost
                await out.prepare(request)
            await out.write(chunk)
        if not out.prepared:
            await out.prepare(request)
        await out.write_eof()
        return out


def _error(message: str) -> bytes:
    """An error as SGLang's endpoints give it."""
    return json.dumps({"error": {"message": message, "type": "service_unavailable"}}).encode()


def _failed(message: str, status: int = 503) -> web.Response:
    return web.Response(status=status, body=_error(message), content_type="application/json")
