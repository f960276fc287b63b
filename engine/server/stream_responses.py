"""Server-sent events, and cancellation when a client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tapscope.core.errors import UsageError

T = TypeVar("T")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; if the client disconnects first, cancel ``work`` and raise UsageError.

    The request's body must have been read before.
    """
    result = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        raise UsageError("the client closed the connection")
    finally:
        gone.cancel()
        result.cancel()
        await asyncio.gather(gone, result, return_exceptions=True)


class EventStream(StreamingResponse):
    """A response of server-sent events that always closes ``events``, even if the response never starts."""

    def __init__(self, events: AsyncGenerator[str], first: str | None, headers: dict[str, str]) -> None:
        self._events = events
        super().__init__(_from(first, events), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def event_stream(events: AsyncGenerator[str]) -> EventStream:
    """Create a response from ``events``, each of which is a complete ``data: ...`` block.

    Waits for the first event, so that an earlier error can become a response with its own status. The response closes
    ``events`` when the client disconnects.
    """
    return EventStream(events, await anext(events, None), {"Cache-Control": "no-cache"})


async def _from(first: str | None, rest: AsyncGenerator[str]) -> AsyncGenerator[str]:
    if first is not None:
        yield first
        async for item in rest:
            yield item


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
