"""The front of ``--afd-restart``: worlds die behind it, and clients see answers or clear errors."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_afd.causes import REQUEST_LOST
from sglang_afd.config import ConfigError
from sglang_afd.front import worlds as worlds_module
from sglang_afd.front.proxy import Proxy
from sglang_afd.front.settings import settings
from sglang_afd.front.worlds import Worlds
from sglang_afd.running import free_port

pytestmark = pytest.mark.unit

Handler = Callable[["FakeWorld", web.Request], Awaitable[web.StreamResponse]]


class FakeWorld:
    """A world that serves in this process; it ends when told to."""

    def __init__(self, number: int, first: asyncio.Event) -> None:
        self.number, self.asked, self.first = number, 0, first
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.signals: list[int] = []

    async def wait(self) -> int:
        return await self.status

    def send_signal(self, sign: int) -> None:
        self.signals.append(sign)
        self.end(0)

    def end(self, status: int) -> None:
        if not self.status.done():
            self.status.set_result(status)


class Front:
    """A front over `FakeWorld`s; ``made`` are those that were started."""

    def __init__(self) -> None:
        self.made: list[FakeWorld] = []
        self.said: list[str] = []
        self.url = ""
        self.session: aiohttp.ClientSession
        self.worlds: Worlds
        self.run: asyncio.Task[int]
        self.gate = asyncio.Event()
        """Worlds come up once it is set."""
        self.gate.set()
        self.first = asyncio.Event()
        """The first event of a stream has come."""

    async def post(self, path: str = "/generate") -> tuple[int, Any]:
        async with self.session.post(self.url + path, json={"text": "x"}) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> int:
        async with self.session.get(self.url + path) as answer:
            return answer.status


def lost() -> web.Response:
    """What a dying world answers."""
    return web.json_response({"message": REQUEST_LOST}, status=503)


async def answer(world: FakeWorld, request: web.Request) -> web.StreamResponse:
    return web.json_response({"world": world.number, "asked": await request.json()})


async def die_once(world: FakeWorld, request: web.Request) -> web.StreamResponse:
    if world.number == 1:
        asyncio.get_running_loop().call_later(0.1, world.end, 1)
        return lost()
    return await answer(world, request)


async def die_always(world: FakeWorld, request: web.Request) -> web.StreamResponse:
    asyncio.get_running_loop().call_later(0.1, world.end, 1)
    return lost()


def fronted(
    monkeypatch: pytest.MonkeyPatch,
    handler: Handler,
    test: Callable[[Front], Awaitable[None]],
    *,
    restarts: int = 3,
    retry: bool = True,
) -> None:
    """Run `test` on a front whose worlds answer by `handler`."""
    monkeypatch.setattr(worlds_module, "_POLL", 0.02)

    async def main() -> None:
        front = Front()
        runners: list[web.AppRunner] = []

        async def serve(handle: Any, port: int) -> None:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handle)
            runners.append(web.AppRunner(app, handler_cancellation=True))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", port).start()

        async def start(argv: Sequence[str]) -> FakeWorld:
            world = FakeWorld(len(front.made) + 1, front.first)
            front.made.append(world)

            async def handle(request: web.Request) -> web.StreamResponse:
                if request.path == "/health":
                    return web.Response(status=200 if front.gate.is_set() else 503)
                world.asked += 1
                return await handler(world, request)

            await serve(handle, int(argv[-1]))
            return world

        monkeypatch.setattr(worlds_module, "start", start)
        port = free_port()
        front.url = f"http://127.0.0.1:{port}"
        front.worlds = Worlds([], restarts, front.said.append)
        async with aiohttp.ClientSession() as session:
            front.session = session
            await serve(Proxy(front.worlds, session, retry=retry).handle, port)
            front.run = asyncio.create_task(front.worlds.run())
            try:
                await asyncio.wait_for(test(front), 20)
            finally:
                front.run.cancel()
                for runner in runners:
                    await runner.cleanup()

    asyncio.run(main())


def test_a_request_whose_world_died_is_answered_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(front: Front) -> None:
        assert await front.post() == (200, {"world": 2, "asked": {"text": "x"}})
        assert len(front.said) == 1 and "1 of 3" in front.said[0]

    fronted(monkeypatch, die_once, test)


@pytest.mark.parametrize(("retry", "path"), [(False, "/generate"), (True, "/open_session")])
def test_a_request_that_may_not_be_asked_again_fails(
    monkeypatch: pytest.MonkeyPatch, retry: bool, path: str
) -> None:
    """By policy, or since the endpoint may have changed something."""

    async def test(front: Front) -> None:
        status, body = await front.post(path)
        assert status == 503 and body["error"]["message"] == REQUEST_LOST
        assert (await front.post(path))[0] == 200, "the next world answers the next request"

    fronted(monkeypatch, die_once, test, retry=retry)


def test_what_kills_its_world_is_asked_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front) -> None:
        assert (await front.post())[0] == 503
        assert [world.asked for world in front.made][:2] == [1, 1] and len(front.made) <= 3

    fronted(monkeypatch, die_always, test)


def test_requests_wait_until_a_world_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """``/health`` does not: it is 503 meanwhile."""

    async def test(front: Front) -> None:
        front.gate.clear()
        asked = asyncio.create_task(front.post())
        await asyncio.sleep(0.2)
        assert not asked.done() and await front.get("/health") == 503
        front.gate.set()
        assert (await asked)[0] == 200 and await front.get("/health") == 200

    fronted(monkeypatch, answer, test)


def test_the_last_world_s_status_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front) -> None:
        for number in (1, 2):
            assert (await front.post())[1]["world"] == number
            front.made[-1].end(-9)
            await asyncio.sleep(0.1)
        assert await front.run == 137
        status, body = await front.post()
        assert status == 503 and body["error"]["message"] == REQUEST_LOST
        assert await front.get("/health") == 503

    fronted(monkeypatch, answer, test, restarts=1)


@pytest.mark.parametrize("status", [0, 2, 130])
def test_some_ends_are_final(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    async def test(front: Front) -> None:
        await front.post()
        front.made[0].end(status)
        assert await front.run == status and len(front.made) == 1

    fronted(monkeypatch, answer, test)


def test_a_deployment_that_never_came_up_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(front: Front) -> None:
        front.gate.clear()
        asked = asyncio.create_task(front.post())
        await asyncio.sleep(0.1)
        front.made[0].end(1)
        assert await front.run == 1 and len(front.made) == 1
        assert (await asked)[0] == 503

    fronted(monkeypatch, answer, test)


def test_a_stop_is_passed_on_and_final(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front) -> None:
        await front.post()
        front.worlds.stop(signal.SIGTERM)
        assert await front.run == 0 and front.made[0].signals == [signal.SIGTERM]

    fronted(monkeypatch, answer, test)


async def streamed(front: Front) -> tuple[list[str], int]:
    """The events of a stream, and the status."""
    events = []
    async with front.session.post(front.url + "/generate", json={}) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                events.append(line[6:].decode().strip())
                front.first.set()
        return events, answer.status


@pytest.mark.parametrize("breaks", [False, True])
def test_a_stream_comes_as_it_is_made(monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    """One that breaks in the middle ends with an error, and is not asked again."""

    async def stream(world: FakeWorld, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b"data: first\n\n")
        await asyncio.wait_for(world.first.wait(), 10)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
            world.end(1)
        await out.write(b"data: second\n\n")
        return out

    async def test(front: Front) -> None:
        events, status = await streamed(front)
        assert status == 200 and events[0] == "first" and len(events) == 2
        if breaks:
            assert json.loads(events[1])["error"]["message"] == REQUEST_LOST
        else:
            assert events[1] == "second"
        assert front.made[0].asked == 1

    fronted(monkeypatch, stream, test)


def test_a_stream_that_was_lost_before_its_first_event_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stream(world: FakeWorld, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        said = REQUEST_LOST if world.number == 1 else "first"
        await out.write(f"data: {said}\n\n".encode())
        if world.number == 1:
            asyncio.get_running_loop().call_later(0.1, world.end, 1)
        return out

    async def test(front: Front) -> None:
        assert await streamed(front) == (["first"], 200)

    fronted(monkeypatch, stream, test)


def test_settings() -> None:
    ranks = ["--afd-attention-ranks", "1", "--afd-ffn-ranks", "1"]
    assert settings([*ranks, "--afd-restart-requests", "fail"]) is None
    found = settings([*ranks, "--afd-restart", "2", "--port", "5", "--host", "0.0.0.0"])
    assert found is not None
    assert (found.restarts, found.retry, found.host, found.port) == (2, True, "0.0.0.0", 5)
    assert not any(arg.startswith("--afd-restart") for arg in found.world)
    assert settings([*ranks, "--afd-restart=1", "--afd-role", "ffn"]).port == 30001  # type: ignore
    for wrong in (
        ["--afd-restart", "-1"],
        ["--afd-restart", "x"],
        ["--afd-restart", "1", "--afd-restart-requests", "x"],
        ["--afd-restart", "1", "--ssl-certfile", "x"],
    ):
        with pytest.raises(ConfigError):
            settings([*ranks, *wrong])
