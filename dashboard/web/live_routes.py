"""Routes of live runs: server-sent events, and polling."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tapscope.core.errors import ConfigError
from tapscope.dashboard.live_run import SHARED_S, LiveRun, LiveRuns
from tapscope.dashboard.model.live import live_page
from tapscope.dashboard.model.schema import to_json
from tapscope.dashboard.web.api import json_response
from tapscope.dashboard.web.roots import Roots

LIVE_S = 0.5
"""Seconds between reads of a live run."""
MAX_STREAMS = 64
"""Maximum number of open event streams; further viewers poll."""


def add_live_routes(app: FastAPI, roots: Roots) -> None:
    """Add the route that returns one view of a run, or streams every change."""
    streams: set[str] = set()
    runs = LiveRuns()

    @app.get("/api/runs/{run_id}/live")
    async def get_live(run_id: str, request: Request, poll: bool = False, step: int | None = None) -> Response:
        path = await asyncio.to_thread(roots.path, run_id)
        live = runs.of(path)
        if poll:
            view = await asyncio.to_thread(live.read, SHARED_S)
            try:
                return json_response(live_page(view, path.name, step))
            except ValueError as error:
                raise ConfigError(str(error)) from None
        if len(streams) >= MAX_STREAMS:
            return JSONResponse({"error": f"{MAX_STREAMS} viewers are connected; poll instead"}, 503)
        events = _events(live, path.name, request.is_disconnected, streams)
        return StreamingResponse(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _events(
    live: LiveRun, run: str, is_disconnected: Callable[[], Awaitable[bool]], streams: set[str]
) -> AsyncIterator[bytes]:
    """Yield every change as a server-sent event.

    Each event has the whole view, so nothing needs to be sent again after a reconnection.
    """
    last, quiet, name = -1, 0, secrets.token_hex(8)
    streams.add(name)
    try:
        yield b"retry: 2000\n\n"
        while not await is_disconnected():
            view = await asyncio.to_thread(live.read, SHARED_S)
            if view.number != last:
                last, quiet = view.number, 0
                yield b"id: %d\ndata: %b\n\n" % (view.number, to_json(live_page(view, run)))
            elif (quiet := quiet + 1) % 20 == 0:
                yield b": still there\n\n"
            await asyncio.sleep(LIVE_S)
    finally:
        streams.discard(name)
