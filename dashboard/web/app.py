"""The web application: pages, JSON of the view model, and server-sent events of live runs."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Scope

from tapscope.comparator import CompareOptions
from tapscope.core.errors import ConfigError, DataError, TapscopeError
from tapscope.core.formatting import middle, printable
from tapscope.dashboard.bench_source import BenchSource
from tapscope.dashboard.browse_source import Query as RecordQuery
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.capture_control import CaptureControl
from tapscope.dashboard.live_run import SHARED_S, LiveRun, LiveRuns
from tapscope.dashboard.model.live import live_page
from tapscope.dashboard.model.magnitudes import MEASURES
from tapscope.dashboard.model.module_graph import run_graph
from tapscope.dashboard.model.permalink import parse_permalink
from tapscope.dashboard.model.record import record_view, value_tile
from tapscope.dashboard.model.run import RunSummary, RunView, cell_records, record_page, run_view
from tapscope.dashboard.model.schema import to_json
from tapscope.dashboard.model.series import metric_series, site_series
from tapscope.dashboard.report.html import environment
from tapscope.dashboard.web.api import Limit, Offset, Text, json_of, json_response
from tapscope.dashboard.web.bench_routes import add_bench_routes
from tapscope.dashboard.web.control_routes import add_control_routes
from tapscope.dashboard.web.diff_jobs import DiffJobs
from tapscope.dashboard.web.login import SESSION_S, Login
from tapscope.dashboard.web.roots import Roots
from tapscope.dashboard.web.table_routes import add_table_routes
from tapscope.http.access import RequestRefused, check_loopback_host, check_origin
from tapscope.http.middleware import AccessMiddleware, BodyLimitMiddleware

STATIC = Path(__file__).resolve().parents[1] / "static"
MAX_BODY = 1 << 16
MAX_PASSWORD = 1024
LIVE_S = 0.5
"""Between two readings of a live run."""
MAX_STREAMS = 64
"""Open event streams; further viewers poll."""
PUBLIC = ("/login", "/static/style.css", "/static/icon.svg")
READ_ONLY_POSTS = ("/logout", "/api/diffs")
"""Besides GET, what read-only sessions may send: they end, and compare runs that they may read."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # no-referrer would make browsers send "Origin: null" with the login form
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
MAX_RUNS = 200
"""Runs of one response; the page asks for more."""


@dataclass(frozen=True, slots=True)
class Runs:
    """A part of the list of runs, newest first."""

    runs: tuple[RunSummary, ...]
    num_runs: int
    """Of the whole list."""


def create_app(
    roots: Roots,
    login: Login,
    *,
    loopback: bool = True,
    benchmarks: BenchSource | None = None,
    control: CaptureControl | None = None,
) -> ASGIApp:
    """The page over ``roots`` and ``benchmarks``.

    On ``loopback`` a request for any other host name is refused (DNS rebinding).
    """
    app = FastAPI(title="tapscope web", docs_url=None, redoc_url=None, openapi_url=None)
    _add_login(app, login)
    _add_runs(app, roots)
    jobs = DiffJobs()
    _add_diffs(app, roots, jobs)
    add_table_routes(app, roots, jobs)
    _add_live(app, roots)
    add_bench_routes(app, benchmarks)
    add_control_routes(app, control, login)
    _add_pages(app, has_benchmarks=benchmarks is not None, has_control=control is not None)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(TapscopeError, _failed)
    app.add_exception_handler(OSError, _gone)
    app.add_exception_handler(RequestValidationError, _invalid)
    guarded: ASGIApp = _LoginMiddleware(app, _error, login)
    guarded = _HostMiddleware(guarded, _error, loopback=loopback)
    guarded = BodyLimitMiddleware(guarded, _error, MAX_BODY)
    return _with_headers(GZipMiddleware(guarded, minimum_size=1000, compresslevel=4))


class _HostMiddleware(AccessMiddleware):
    """Refuses other origins, and on loopback other host names."""

    def __init__(self, app: ASGIApp, error_response: Callable[[str, int, str], Response], *, loopback: bool) -> None:
        super().__init__(app, error_response)
        self._loopback = loopback

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused for either."""
        check_origin(headers)
        if self._loopback:
            check_loopback_host(headers)


class _LoginMiddleware(AccessMiddleware):
    """Requires a session, except for the login page; read-only sessions may only read, whatever a route does."""

    def __init__(self, app: ASGIApp, error_response: Callable[[str, int, str], Response], login: Login) -> None:
        super().__init__(app, error_response, PUBLIC)
        self._login = login

    def check_scope(self, scope: Scope) -> None:
        """Raise RequestRefused without a session, and where a read-only one would change something."""
        is_reading = scope["method"] in ("GET", "HEAD") or scope["path"] in READ_ONLY_POSTS
        (self._login.check if is_reading else self._login.check_full)(Headers(scope=scope))


def _with_headers(app: ASGIApp) -> ASGIApp:
    """Security headers on every response."""

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
    """JSON below ``/api/``, else the login page or a sentence."""
    if path.startswith("/api/"):
        return JSONResponse({"error": text}, status)
    if status == 401:
        return RedirectResponse("/login", 303)
    return HTMLResponse(environment().get_template("login.html.j2").render(message=text, password=False), status)


def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": printable(str(error))}, 404 if isinstance(error, DataError) else 400)


def _invalid(request: Request, error: Exception) -> Response:
    """The first parameter that is missing or wrong, in a sentence."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name, problem = str(first["loc"][-1]), str(first["msg"])
    text = f"missing parameter {name!r}" if first["type"] == "missing" else ""
    text = text or f"invalid {name} {middle(str(first['input']), 60)!r}: {problem[:1].lower()}{problem[1:]}"
    return JSONResponse({"error": printable(text)}, 400)


def _gone(request: Request, error: Exception) -> Response:
    text = f"the run cannot be read, it may have been moved or removed: {error}"
    return JSONResponse({"error": printable(text)}, 404)


# --- login -----------------------------------------------------------------------------------------


def _add_login(app: FastAPI, login: Login) -> None:
    def form(message: str, status: int = 200) -> Response:
        page = environment().get_template("login.html.j2").render(message=message, password=login.needs_password)
        return HTMLResponse(page, status)

    def opened(session: str) -> Response:
        response = RedirectResponse("/", 303)
        response.set_cookie(login.cookie, session, max_age=int(SESSION_S), httponly=True, samesite="strict", path="/")
        return response

    @app.get("/login")
    def get_login(token: str = "") -> Response:
        if not token:
            return form(f"Log in: {login.hint}.")
        try:
            return opened(login.by_link(token))
        except RequestRefused as refused:
            return form(refused.error, refused.status)

    @app.post("/login")
    async def post_login(request: Request) -> Response:
        try:
            fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=8)
        except ValueError:
            return form("the form has more fields than a password; use the form of this page", 400)
        password = fields.get("password", [""])[0][:MAX_PASSWORD]
        try:
            return opened(await asyncio.to_thread(login.by_password, password))
        except RequestRefused as refused:
            return form(refused.error, refused.status)

    @app.post("/logout")
    def post_logout(request: Request) -> Response:
        login.logout(request.headers)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(login.cookie, path="/")
        return response


# --- data ------------------------------------------------------------------------------------------


def _add_runs(app: FastAPI, roots: Roots) -> None:
    @app.get("/api/runs")
    def get_runs(offset: Offset = 0) -> Response:
        return json_response(Runs(roots.summaries(offset, MAX_RUNS), roots.num_runs))

    @app.get("/api/link")
    def get_link(link: Annotated[str, Query(max_length=2000)]) -> Response:
        return json_response(roots.places_of(parse_permalink(link)))

    @app.get("/api/runs/{run_id}")
    def get_run(run_id: str, rank: int | None = None, measure: Text = MEASURES[0]) -> Response:
        def view(source: RunSource) -> RunView:
            return run_view(source, run_id, rank=rank, measure=measure)

        return json_of(roots.json(run_id, ("run", rank, measure), view))

    @app.get("/api/runs/{run_id}/records")
    def get_records(
        run_id: str, step: int, rank: int = 0, find: Text = "", offset: Offset = 0, limit: Limit = 2000
    ) -> Response:
        query = RecordQuery(step, rank, find=find)
        key = "records", query, offset, limit
        return json_of(roots.json(run_id, key, lambda source: record_page(source.records(query), offset, limit)))

    @app.get("/api/runs/{run_id}/modules")
    def get_modules(run_id: str, step: int, rank: int = 0) -> Response:
        return json_of(roots.json(run_id, ("modules", step, rank), lambda source: run_graph(source, step, rank)))

    @app.get("/api/runs/{run_id}/cell")
    def get_cell(run_id: str, site: Text, first: int, last: int, rank: int | None = None) -> Response:
        return json_response(cell_records(roots.source(run_id), site, first, last, rank))

    @app.get("/api/runs/{run_id}/tensor")
    def get_tensor(run_id: str, site: str, step: int, rank: int = 0, key: str = "") -> Response:
        source, record = roots.record(run_id, site, step, rank, key)
        return json_response(record_view(source.run, record, source.num_firings(record)))

    @app.get("/api/runs/{run_id}/series")
    def get_series(run_id: str, site: Text = "") -> Response:
        series = (lambda source: site_series(source, site)) if site else metric_series
        return json_of(roots.json(run_id, ("series", site), series))

    @app.get("/api/runs/{run_id}/tile")
    def get_tile(
        run_id: str, site: str, step: int, rank: int = 0, key: str = "", row: int = 0, column: int = 0
    ) -> Response:
        source, record = roots.record(run_id, site, step, rank, key)
        return json_response(value_tile(source.run, record, row, column))


def _add_diffs(app: FastAPI, roots: Roots, jobs: DiffJobs) -> None:
    @app.post("/api/diffs")
    def post_diff(baseline: str, target: str, rtol: float | None = None, atol: float | None = None) -> Response:
        options = CompareOptions(rtol=rtol, atol=atol)
        return json_response(jobs.start(roots.path(baseline), roots.path(target), options).state)

    @app.get("/api/diffs/{job_id}")
    def get_diff(job_id: str) -> Response:
        return json_response(jobs.get(job_id).state)

    @app.get("/api/diffs/{job_id}/view")
    def get_view(job_id: str) -> Response:
        page = jobs.get(job_id).page
        return JSONResponse({"error": "still comparing"}, 409) if page is None else json_response(page)

    @app.get("/api/diffs/{job_id}/findings")
    def get_findings(job_id: str, offset: Offset = 0, limit: Limit = 2000) -> Response:
        return json_response(jobs.get(job_id).findings(offset, limit))

    @app.get("/api/diffs/{job_id}/places")
    def get_places(job_id: str) -> Response:
        return json_response(jobs.get(job_id).places())

    @app.get("/api/diffs/{job_id}/modules")
    def get_modules(job_id: str) -> Response:
        return json_response(jobs.get(job_id).modules())

    @app.get("/api/diffs/{job_id}/pairs/{order}")
    def get_pair(
        job_id: str, order: int, rows: int = 7, columns: int = 12, first: int | None = None, last: int | None = None
    ) -> Response:
        steps = None if first is None else (first, first if last is None else last)
        return json_response(jobs.get(job_id).pair(order, rows, columns, steps))

    @app.get("/api/diffs/{job_id}/pairs/{order}/series")
    def get_pair_series(job_id: str, order: int) -> Response:
        return json_response(jobs.get(job_id).series(order))

    @app.get("/api/diffs/{job_id}/pairs/{order}/tile")
    def get_pair_tile(job_id: str, order: int, row: int, column: int, rows: int = 7, columns: int = 12) -> Response:
        return json_response(jobs.get(job_id).tile(order, row, column, rows, columns))


def _add_live(app: FastAPI, roots: Roots) -> None:
    streams: set[str] = set()
    runs = LiveRuns()

    @app.get("/api/runs/{run_id}/live")
    async def get_live(run_id: str, request: Request, poll: bool = False, step: int | None = None) -> Response:
        path = await asyncio.to_thread(roots.path, run_id)
        live = runs.of(path)
        if poll:
            view = await asyncio.to_thread(live.read, SHARED_S)
            try:
                return json_response(live_page(view, step))
            except ValueError as error:
                raise ConfigError(str(error)) from None
        if len(streams) >= MAX_STREAMS:
            return JSONResponse({"error": f"{MAX_STREAMS} viewers are connected; poll instead"}, 503)
        events = _events(live, request.is_disconnected, streams)
        return StreamingResponse(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _events(
    live: LiveRun, is_disconnected: Callable[[], Awaitable[bool]], streams: set[str]
) -> AsyncIterator[bytes]:
    """Every change as an event that holds the whole view: after a reconnection nothing has to be sent again."""
    last, quiet, name = -1, 0, secrets.token_hex(8)
    streams.add(name)
    try:
        yield b"retry: 2000\n\n"
        while not await is_disconnected():
            view = await asyncio.to_thread(live.read, SHARED_S)
            if view.number != last:
                last, quiet = view.number, 0
                yield b"id: %d\ndata: %b\n\n" % (view.number, to_json(live_page(view)))
            elif (quiet := quiet + 1) % 20 == 0:
                yield b": still there\n\n"
            await asyncio.sleep(LIVE_S)
    finally:
        streams.discard(name)


def _add_pages(app: FastAPI, *, has_benchmarks: bool, has_control: bool) -> None:
    """One shell for every page; the script shows what the address asks for."""

    def shell() -> Response:
        return HTMLResponse(
            environment().get_template("shell.html.j2").render(benchmarks=has_benchmarks, control=has_control)
        )

    kinds = ("benchmarks", "control", "run", "diff", "tensor", "live", "open")
    for path in ("/", *(f"/{kind}/{{rest:path}}" for kind in kinds)):
        app.add_api_route(path, shell, methods=["GET"], response_class=HTMLResponse)
