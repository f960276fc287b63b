"""Door: who may come in, and with how much. ASGI middleware, so that streams and hang-ups pass through untouched."""

import hmac
from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Answer = Callable[[str, int, str], JSONResponse]
"""(path, status, sentence) -> an error in the path's dialect."""

WEIGHTS_PATH = "/update_weights_from_tensor"
_OPEN = ("/health",)
_GUARDED_ELSEWHERE = "/dumper/"  # the dumper's routes have a guard and a token of their own
_MAX_DISCARDED = 1 << 30  # bytes of a too long body that are read, so that its sender sees the answer


class KeyDoor:
    """Lets in who knows the API key."""

    def __init__(self, app: ASGIApp, key: str, answer: Answer) -> None:
        self._app = app
        self._key = key.encode()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        path = scope.get("path", "")
        if scope["type"] != "http" or path in _OPEN or path.startswith(_GUARDED_ELSEWHERE):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if hmac.compare_digest(given.encode("utf-8", "replace"), self._key):
            await self._app(scope, receive, send)
            return
        reason = "wrong API key" if given else "this needs an API key"
        text = f"{reason}; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        response = self._answer(path, 401, text)
        response.headers["WWW-Authenticate"] = 'Bearer realm="tapscope"'
        await response(scope, receive, send)


class PageDoor:
    """Keeps web pages of other origins out: a browser on this host would carry their requests to a loopback server."""

    def __init__(self, app: ASGIApp, answer: Answer) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 403."""
        if scope["type"] == "http" and not scope["path"].startswith(_GUARDED_ELSEWHERE):
            headers = Headers(scope=scope)
            origin, host = headers.get("origin"), headers.get("host", "").lower()
            if origin is not None and (not host or origin.lower().partition("://")[2] != host):
                text = f"a web page of {origin[:200]!r} may not use this server; use a program"
                await self._answer(scope["path"], 403, text)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class SizeDoor:
    """Refuses bodies that are too long, without holding them, and bodies of two lengths.

    A proxy may go by Content-Length where this server goes by Transfer-Encoding, and take part of a body for another
    client's request (request smuggling, RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_weights_bytes: int, answer: Answer) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_weights_bytes = max_weights_bytes
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 413 or 400."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._max_weights_bytes if scope["path"] == WEIGHTS_PATH else self._max_bytes
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            text = "the request has both Content-Length and Transfer-Encoding; send one of them"
            await self._close(400, text, scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
            await _discard(receive)
            await self._refuse(limit, scope, receive, send)
            return
        counted = _Counted(receive, limit)
        try:
            await self._app(scope, counted, send)
        except BodyTooLongError:
            await _discard(receive)
            await self._refuse(limit, scope, receive, send)

    async def _refuse(self, limit: int, scope: Scope, receive: Receive, send: Send) -> None:
        await self._close(413, f"the body is longer than {limit} bytes", scope, receive, send)

    async def _close(self, status: int, text: str, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._answer(scope["path"], status, text)
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


class BodyTooLongError(Exception):
    """More has come than is allowed; raised where the body is read."""


class _Counted:
    """``receive`` that raises BodyTooLongError once more than ``limit`` bytes have come."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise BodyTooLongError
        return message


async def _discard(receive: Receive) -> None:
    """Read on, within reason: who is cut off while sending does not see the answer."""
    num_bytes = 0
    while num_bytes < _MAX_DISCARDED:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
