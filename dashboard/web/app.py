"""Web application: pages, JSON of the view model, and server-sent events of live runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Scope

from tapscope.core.errors import DataError, TapscopeError
from tapscope.core.formatting import middle, printable
from tapscope.dashboard.bench_source import BenchSource
from tapscope.dashboard.capture_control import CaptureControl
from tapscope.dashboard.report.html import environment
from tapscope.dashboard.web.bench_routes import add_bench_routes
from tapscope.dashboard.web.control_routes import add_control_routes
from tapscope.dashboard.web.diff_jobs import DiffJobs
from tapscope.dashboard.web.diff_routes import add_diff_routes
from tapscope.dashboard.web.live_routes import add_live_routes
from tapscope.dashboard.web.login import Login
from tapscope.dashboard.web.login_routes import add_login_routes
from tapscope.dashboard.web.roots import Roots
from tapscope.dashboard.web.run_routes import add_run_routes
from tapscope.dashboard.web.table_routes import add_table_routes
from tapscope.http.access import check_loopback_host, check_origin
from tapscope.http.middleware import AccessMiddleware, BodyLimitMiddleware

STATIC = Path(__file__).resolve().parents[1] / "static"
MAX_BODY = 1 << 16
PUBLIC = ("/login", "/static/style.css", "/static/icon.svg")
READ_ONLY_POSTS = ("/logout", "/api/diffs")
"""Paths to which read-only sessions may send POST: to log out, and to compare runs that they may read."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers would send "Origin: null" with the login form
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]


def create_app(
    roots: Roots,
    login: Login,
    *,
    loopback: bool = True,
    benchmarks: BenchSource | None = None,
    control: CaptureControl | None = None,
) -> ASGIApp:
    """Build the web application over ``roots`` and ``benchmarks``.

    On ``loopback``, requests for any other host name are refused, which prevents DNS rebinding.
    """
    app = FastAPI(title="tapscope web", docs_url=None, redoc_url=None, openapi_url=None)
    add_login_routes(app, login)
    add_run_routes(app, roots)
    jobs = DiffJobs()
    add_diff_routes(app, roots, jobs)
    add_table_routes(app, roots, jobs)
    add_live_routes(app, roots)
    add_bench_routes(app, benchmarks)
    add_control_routes(app, control, login)
    _add_pages(app, has_benchmarks=benchmarks is not None, has_control=control is not None)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(TapscopeError, _failed)
    app.add_exception_handler(OSError, _gone)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _not_routed)
    guarded: ASGIApp = _LoginMiddleware(app, _error, login)
    guarded = _HostMiddleware(guarded, _error, loopback=loopback)
    guarded = BodyLimitMiddleware(guarded, _error, MAX_BODY)
    return _with_headers(GZipMiddleware(guarded, minimum_size=1000, compresslevel=4))


class _HostMiddleware(AccessMiddleware):
    """Refuses requests from other origins and, on loopback, for other host names."""

    def __init__(self, app: ASGIApp, error_response: Callable[[str, int, str], Response], *, loopback: bool) -> None:
        super().__init__(app, error_response)
        self._loopback = loopback

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused for another origin, or for another host name on loopback."""
        check_origin(headers)
        if self._loopback:
            check_loopback_host(headers)


class _LoginMiddleware(AccessMiddleware):
    """Requires a session, except on public pages. Read-only sessions may only read, whatever the route."""

    def __init__(self, app: ASGIApp, error_response: Callable[[str, int, str], Response], login: Login) -> None:
        super().__init__(app, error_response, PUBLIC)
        self._login = login

    def check_scope(self, scope: Scope) -> None:
        """Raise RequestRefused without a session, and for a read-only session whose request may change state."""
        is_reading = scope["method"] in ("GET", "HEAD") or scope["path"] in READ_ONLY_POSTS
        (self._login.check if is_reading else self._login.check_full)(Headers(scope=scope))


def _with_headers(app: ASGIApp) -> ASGIApp:
    """Wrap ``app`` to add security headers to every response."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                added = [header for header in _RAW_HEADERS if header[0] not in known]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await app(scope, receive, send_with_headers if scope["type"] == "http" else send)

    return wrapped


def _error(path: str, status: int, text: str) -> Response:
    """Return the error as JSON below ``/api/``, else redirect to the login page or show the message there."""
    if path.startswith("/api/"):
        return JSONResponse({"error": text}, status)
    if status == 401:
        return RedirectResponse("/login", 303)
    return HTMLResponse(environment().get_template("login.html.j2").render(message=text, password=False), status)


def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": printable(str(error))}, 404 if isinstance(error, DataError) else 400)


def _invalid(request: Request, error: Exception) -> Response:
    """Describe the first missing or invalid parameter in one sentence."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name, problem = str(first["loc"][-1]), str(first["msg"])
    text = f"missing parameter {name!r}" if first["type"] == "missing" else ""
    text = text or f"invalid {name} {middle(str(first['input']), 60)!r}: {problem[:1].lower()}{problem[1:]}"
    return JSONResponse({"error": printable(text)}, 400)


def _not_routed(request: Request, error: Exception) -> Response:
    """Return 404 or 405 for an unknown path or method: a page for browsers, else JSON."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    text = f"{request.method} {middle(path, 200)}: {error.detail.lower()}"
    if error.status_code == 404:
        text = f"no {'route' if path.startswith('/api/') else 'page'} at {middle(path, 200)}"
        if "text/html" in request.headers.get("accept", "") and not path.startswith("/api/"):
            return HTMLResponse(environment().get_template("missing.html.j2").render(message=printable(text)), 404)
    return JSONResponse({"error": printable(text)}, error.status_code, error.headers)


def _gone(request: Request, error: Exception) -> Response:
    text = f"the run cannot be read, it may have been moved or removed: {error}"
    return JSONResponse({"error": printable(text)}, 404)


def _add_pages(app: FastAPI, *, has_benchmarks: bool, has_control: bool) -> None:
    """Serve the same shell for every page; its script renders the page that the path selects."""

    def shell() -> Response:
        return HTMLResponse(
            environment().get_template("shell.html.j2").render(benchmarks=has_benchmarks, control=has_control)
        )

    kinds = ("benchmarks", "control", "run", "diff", "tensor", "live", "open")
    for path in ("/", *(f"/{kind}/{{rest:path}}" for kind in kinds)):
        app.add_api_route(path, shell, methods=["GET"], response_class=HTMLResponse)
