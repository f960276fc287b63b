"""HTTP control: a router for the recorder's own app or a host's app, and the recorder's server thread."""

import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import TapscopeError, UnreachableError
from tapscope.dumper.control.access_guard import Guard
from tapscope.dumper.control.control_client import ControlClient
from tapscope.http.access import RequestRefused

if TYPE_CHECKING:
    import uvicorn
    from fastapi import APIRouter, FastAPI, Request, Response
    from fastapi.routing import APIRoute

__all__ = ["ControlClient", "ControlServer", "Guard", "make_app", "make_router"]

Client = ControlClient | Callable[[], ControlClient]
_Handler = Callable[["Request"], Coroutine[Any, Any, "Response"]]

LIMITS: dict[str, Any] = {"max_connections": 64, "answer_s": 60.0}
"""Arguments of :class:`~tapscope.http.connection.ConnectionLimits`, whose import needs the server's packages."""
BACKLOG = 32
"""Listen backlog of the server's socket; each accepted connection is an open file until it is closed."""


Reopen = Callable[[dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]


def make_router(
    client: Client, guard: Guard | None = None, *, metrics: bool = True, reopen: Reopen | None = None
) -> "APIRouter":
    """Return a router with the ``/dumper`` routes and ``/metrics``, for the recorder's own app or a host's FastAPI app.

    ``guard`` checks every request (default: only reject cross-origin requests). Pass ``metrics=False`` if the host
    serves its own ``/metrics``. ``reopen`` handles a reset when no recorder is running, by starting a new one.
    """
    from fastapi import APIRouter

    from tapscope.dumper.control.routes import add_routes

    router = APIRouter(tags=["dumper"], route_class=_guarded(guard or Guard()))
    add_routes(router, _asker(client, reopen), metrics=metrics)
    _add_catch_all(router, "/dumper/{rest:path}", [router])
    return router


def make_app(client: Client, guard: Guard | None = None) -> "FastAPI":
    """Return the standalone control app, with its description at ``/openapi.json``."""
    from fastapi import APIRouter, FastAPI
    from fastapi.responses import JSONResponse

    guard = guard or Guard()
    text = 'Control the taps of a running job. Every error is `{"error": SENTENCE}`.'
    app = FastAPI(title="tapscope dumper", description=text, openapi_url=None, docs_url=None, redoc_url=None)
    dumper = make_router(client, guard)
    app.include_router(dumper)
    rest = APIRouter(route_class=_guarded(guard))

    @rest.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    _add_catch_all(rest, "/{rest:path}", [dumper, rest])
    app.include_router(rest)
    return app


def _asker(
    client: Client, reopen: Reopen | None
) -> Callable[[str, dict[str, Any] | None], Awaitable[tuple[int, dict[str, Any]]]]:
    from fastapi.concurrency import run_in_threadpool

    def ask(verb: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        try:
            return (client if isinstance(client, ControlClient) else client()).call(verb, body)
        except TapscopeError as error:
            return 503 if isinstance(error, UnreachableError) else 502, {"error": str(error)}

    async def asking(verb: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        status, answer = await run_in_threadpool(ask, verb, body)
        if status == 503 and reopen is not None:
            if verb == "reset":
                return await reopen(body or {})
            answer = answer | {
                "error": f"{answer['error']}; /dumper/reset continues in a new run with another recorder"
            }
        return status, answer

    return asking


def _guarded(guard: Guard) -> "type[APIRoute]":
    """Return a route class that checks each request with ``guard`` and answers refusals with ``{"error": ...}``."""
    from fastapi.responses import JSONResponse
    from fastapi.routing import APIRoute
    from starlette.requests import ClientDisconnect

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> _Handler:
            inner = super().get_route_handler()

            async def handler(request: "Request") -> "Response":
                try:
                    guard.check(request.headers)
                    return await inner(request)
                except RequestRefused as refusal:
                    return JSONResponse({"error": refusal.error}, refusal.status, refusal.headers)
                except ClientDisconnect:
                    return JSONResponse({"error": "the client has gone"}, 400)  # never delivered

            return handler

    return GuardedRoute


def _add_catch_all(router: "APIRouter", path: str, routers: "list[APIRouter]") -> None:
    """Add the fallback route: 405 for a known path with the wrong method, 404 for any other path."""
    from fastapi import Request
    from fastapi.routing import APIRoute

    async def refuse(request: Request) -> None:
        routes = [route for each in routers for route in each.routes if isinstance(route, APIRoute)]
        known = {route.path: route.methods for route in routes if "{" not in route.path}
        if methods := known.get(request.url.path):
            allowed = ", ".join(sorted(methods))
            text = f"{request.method} is not allowed on {request.url.path}; use {allowed}"
            raise RequestRefused(405, text, {"Allow": allowed})
        raise RequestRefused(404, f"unknown route {request.url.path[:200]}; routes: {', '.join(sorted(known))}")

    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
    router.add_api_route(path, refuse, methods=methods, include_in_schema=False, response_model=None)


class ControlServer:
    """A uvicorn server on a bound socket, in a background thread.

    The thread also imports FastAPI, because that takes longer than the start of a recorder. Requests that arrive
    earlier wait in the socket's backlog.
    """

    def __init__(self, make: "Callable[[], FastAPI]", bound: socket.socket) -> None:
        """``make`` builds the app to serve. If it fails, ``bound`` is closed and the error is printed to stderr."""
        self._make = make
        self._socket = bound
        self._server: uvicorn.Server | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="tapscope-control", daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the server; pending responses have two seconds to finish."""
        self._is_stopped = True
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(timeout=2)
        self._socket.close()

    def _run(self) -> None:
        try:
            import uvicorn

            from tapscope.http.connection import ConnectionLimits, bounded

            # uvicorn warns about bytes that are not HTTP, so any client could flood the log with warnings.
            config = uvicorn.Config(
                self._make(),
                http=bounded(ConnectionLimits(**LIMITS)),
                ws="none",
                backlog=BACKLOG,
                log_level="error",
                lifespan="off",
                access_log=False,
                server_header=False,
            )
            self._server = uvicorn.Server(config)
            if not self._is_stopped:
                self._server.run([self._socket])
        except BaseException:
            self._socket.close()
            raise
