"""ASGI middleware for access control and body limits. Streams and disconnects pass through unchanged."""

from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tapscope.http.access import RequestRefused, check_origin, check_token
from tapscope.http.body import BodyTooLongError, LimitedReceive, announced_length, discard_body

ErrorResponse = Callable[[str, int, str], Response]
"""Function (path, status, message) -> error response in the format of the API at that path."""


class AccessMiddleware:
    """Base class of middleware that rejects requests based on their headers."""

    def __init__(self, app: ASGIApp, error_response: ErrorResponse, exempt: tuple[str, ...] = ()) -> None:
        """``exempt``: paths that pass unchecked; a trailing slash exempts all paths below."""
        self._app = app
        self._error_response = error_response
        self._exempt = exempt
        self._exempt_below = tuple(path for path in exempt if path.endswith("/"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request (ASGI), or respond with 401 or 403."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in self._exempt and not path.startswith(self._exempt_below):
            try:
                self.check_scope(scope)
            except RequestRefused as refused:
                response = self._error_response(path, refused.status, refused.error)
                response.headers.update(refused.headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check_scope(self, scope: Scope) -> None:
        """Raise RequestRefused if the request is not allowed; by default, :meth:`check` decides."""
        self.check(Headers(scope=scope))

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused if a request with these headers is not allowed."""
        raise NotImplementedError


class CrossOriginMiddleware(AccessMiddleware):
    """Middleware that rejects requests from web pages of other origins."""

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused for a request from another origin."""
        check_origin(headers)


class ApiKeyMiddleware(AccessMiddleware):
    """Middleware that requires an API key."""

    def __init__(self, app: ASGIApp, error_response: ErrorResponse, key: str, exempt: tuple[str, ...] = ()) -> None:
        super().__init__(app, error_response, exempt)
        self._key = key

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused unless the headers contain the key."""
        hint = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        check_token(headers, self._key, names=("x-api-key",), hint=hint, what="API key")


class BodyLimitMiddleware:
    """Middleware that rejects bodies that are too long, without buffering them, and bodies with ambiguous length.

    If a request has both headers, a proxy may use Content-Length where this server uses Transfer-Encoding. The proxy
    would then treat part of the body as another client's request (request smuggling, RFC 9112, 6.1).
    """

    def __init__(
        self, app: ASGIApp, error_response: ErrorResponse, max_bytes: int, path_limits: Mapping[str, int] | None = None
    ) -> None:
        """``path_limits`` overrides ``max_bytes`` for individual paths."""
        self._app = app
        self._error_response = error_response
        self._max_bytes = max_bytes
        self._path_limits = path_limits or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request (ASGI), or respond with 413 or 400."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._path_limits.get(scope["path"], self._max_bytes)
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            text = "the request has both Content-Length and Transfer-Encoding; send one of them"
            await self._close(400, text, scope, receive, send)
            return
        try:
            if announced_length(headers) > limit:
                raise BodyTooLongError
            await self._app(scope, LimitedReceive(receive, limit), send)
        except BodyTooLongError:
            await discard_body(receive)
            await self._close(413, f"the body is longer than {limit} bytes", scope, receive, send)

    async def _close(self, status: int, text: str, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._error_response(scope["path"], status, text)
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
