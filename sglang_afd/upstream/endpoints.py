"""The deployment's own addresses on SGLang's HTTP server: /afd and what lies below it."""

from __future__ import annotations

import time
from typing import Any

from sglang_afd.observe import status
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.placement import place_anew
from sglang_afd.upstream.telemetry import MOST_STEPS, RECORD, SHOW, WATCH


def _add_routes(server_args: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Add the routes to SGLang's application, which this process is about to serve."""
    from fastapi import HTTPException, Query
    from fastapi.responses import HTMLResponse, JSONResponse
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    # Of the functions' annotations FastAPI makes the server's description of itself, and sees no
    # names that are imported here.
    started = time.time()

    async def tell(**orders: int) -> None:
        told = await manager.set_internal_state(SetInternalStateReq(server_args=orders))
        if not all(told):
            raise HTTPException(503, "not every rank took the order; see the server's log")

    @app.get("/afd", include_in_schema=False)
    async def page() -> Any:
        return HTMLResponse(status.page())

    @app.get("/afd/status")
    async def tell_status() -> Any:
        """What every rank is, holds and does."""
        await tell(**{WATCH: 1})
        states = await manager.get_internal_state()
        loads = await manager.get_loads(include=["core"])
        return JSONResponse(
            status.of(states, {load.dp_rank: load.to_dict() for load in loads}, started)
        )

    @app.post("/afd/experts")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def place(table: dict[str, Any]) -> Any:
        """Place experts anew, as --afd-expert-placement would; requests that run wait."""
        problem = await place_anew(manager, table)
        if problem is not None:
            raise HTTPException(400, problem)
        return JSONResponse({"success": True})

    @app.post("/afd/trace")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def record(steps: int = Query(10, ge=1, le=MOST_STEPS)) -> Any:
        """Record the next steps of every rank; GET /afd/trace hands them out."""
        await tell(**{RECORD: steps})
        return JSONResponse({"steps": steps})

    @app.get("/afd/trace")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def hand_out() -> Any:
        """What the ranks have recorded so far."""
        await tell(**{SHOW: 1})
        states = await manager.get_internal_state()
        await tell(**{SHOW: 0})
        trace = status.trace_of(states)
        if not trace["ranks"]:
            raise HTTPException(404, "no trace was asked for: POST /afd/trace?steps=N begins one")
        return JSONResponse(trace)


HOOKS = (
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        Kind.BEFORE,
        _add_routes,
        "people and tools ask the server itself how its ranks are",
    ),
)
