"""Ids of HTTP requests in the header x-request-id, which clients may send and every response includes."""

from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tapscope.engine.api.usage import new_id

HEADER = "x-request-id"
_ANTHROPIC_HEADER = "request-id"  # the header that Anthropic's Python package reads
_MAX_LENGTH = 512  # the limit of OpenAI's X-Client-Request-Id

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request that the current task handles; None outside of requests."""


class RequestIdMiddleware:
    """ASGI middleware that assigns an id to each HTTP request and returns the id in the response headers.

    The id is the request's ``x-request-id`` header, or a new id unless the header has 1 to 512 printable ASCII
    characters. Responses of Anthropic's routes also include the id as ``request-id``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI) with :data:`request_id` set."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        is_valid = 0 < len(given) <= _MAX_LENGTH and given.isascii() and given.isprintable()
        # Not reset: the handler of unexpected exceptions runs outside this middleware, in the same task.
        request_id.set(given if is_valid else new_id("req_"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                add_request_id(MutableHeaders(scope=message), scope["path"])
            await send(message)

        await self._app(scope, receive, send_with_id)


def add_request_id(headers: MutableHeaders, path: str) -> None:
    """Add the current request's id to the headers of a response to ``path``."""
    current = request_id.get()
    if current is not None:
        headers[HEADER] = current
        if path.startswith("/v1/messages"):
            headers[_ANTHROPIC_HEADER] = current
