"""The FastAPI app: routes, middleware, error handlers, and a lifespan that connects the engine client."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from tapscope._version import __version__
from tapscope.core.errors import OverloadedError, TapscopeError, UsageError
from tapscope.engine.api.errors import error_body, error_response_of
from tapscope.engine.runners.engine_client import EngineClient
from tapscope.engine.runners.latency_metrics import LatencyMetrics, Listener
from tapscope.engine.server import anthropic_routes, native_routes, openai_routes, weight_routes
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.request_id import RequestIdMiddleware, add_request_id, request_id
from tapscope.engine.server.request_log import RequestLog
from tapscope.engine.server.request_traces import RequestTraces, TraceMiddleware
from tapscope.engine.server.route_common import BodyReader
from tapscope.engine.server.server_settings import ServerSettings
from tapscope.http.middleware import ApiKeyMiddleware, BodyLimitMiddleware, CrossOriginMiddleware
from tapscope.http.prometheus import content_type, joined

if TYPE_CHECKING:
    from tapscope.engine.llm import LLM

MoreMetrics = Callable[[str], Awaitable[bytes]]
"""Function that returns additional metrics in the format of an Accept header; empty if unavailable."""
_log = logging.getLogger(__name__)
_DUMPER = ("/dumper/",)  # the dumper's routes check access themselves
Connect = Callable[[LatencyMetrics], AbstractAsyncContextManager[EngineClient]]


def make_app(llm: "LLM", routers: Sequence[APIRouter] = (), settings: ServerSettings | None = None) -> FastAPI:
    """Create an app that runs ``llm``'s engine in a thread during its lifespan; ``routers`` add further routes.

    The app does not close ``llm``. While the app runs, no other code may use ``llm``. Raises UsageError for dp > 1.
    """
    if llm.config.dp > 1:
        raise UsageError(f"dp={llm.config.dp}: an app of an LLM has one engine; use `tapscope serve --dp N`")
    settings = settings or ServerSettings()
    state = AppState(llm.config.model, settings)

    @asynccontextmanager
    async def connect(latency_metrics: LatencyMetrics) -> AsyncIterator[EngineClient]:
        from tapscope.engine.runners.async_runner import AsyncRunner

        runner = AsyncRunner(
            llm.engine, llm.tokenizer, latency_metrics=latency_metrics, max_waiting=settings.max_waiting
        )
        try:
            yield runner.client()
        finally:
            await asyncio.to_thread(runner.stop)
            runner.close()

    return build_app(state, connect, routers)


def build_app(
    state: AppState, connect: Connect, routers: Sequence[APIRouter] = (), more_metrics: MoreMetrics | None = None
) -> FastAPI:
    """Create the app; ``connect`` is a context manager that provides the engine client during the app's lifespan.

    Raises ConfigError or MissingExtraError if ``settings.otlp_traces_endpoint`` cannot be used.
    """
    endpoint = state.settings.otlp_traces_endpoint
    traces = None if endpoint is None else RequestTraces(endpoint, state.model_name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        log = RequestLog(state.settings.request_log) if state.settings.request_log else None
        listeners: list[Listener | None] = [state.metrics, log, traces]
        async with connect(LatencyMetrics(tuple(each for each in listeners if each is not None))) as client:
            state.client = client
            waiting = asyncio.ensure_future(_await_engine(state))
            try:
                yield
            finally:
                waiting.cancel()
        if log is not None:
            log.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    app = FastAPI(title="tapscope engine", version=__version__, lifespan=lifespan)
    app.add_exception_handler(TapscopeError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    settings = state.settings
    app.add_middleware(
        BodyLimitMiddleware,
        error_response=error_response,
        max_bytes=settings.max_body_bytes,
        path_limits={weight_routes.WEIGHTS_PATH: settings.max_weights_bytes},
    )
    app.add_middleware(CrossOriginMiddleware, error_response=error_response, exempt=_DUMPER)
    if settings.api_key is not None:
        exempt = ("/health", "/ping", *_DUMPER)
        app.add_middleware(ApiKeyMiddleware, error_response=error_response, key=settings.api_key, exempt=exempt)
    if traces is not None:
        app.add_middleware(TraceMiddleware, traces=traces)
    app.add_middleware(RequestIdMiddleware)  # the middleware added last is the outermost
    _add_metrics(app, state, more_metrics)
    reader = BodyReader(state)
    own = (
        native_routes.make_router(state, reader),
        weight_routes.make_router(state),
        openai_routes.make_router(state, reader),
        anthropic_routes.make_router(state, reader),
    )
    for router in (*own, *routers):
        app.include_router(router)
    return app


async def _await_engine(state: AppState) -> None:
    """Mark the app as ready once every replica has responded."""
    try:
        await state.client.call_all("state")
        state.is_ready = True
    except TapscopeError as error:  # /health also reports this error, as client.failure
        _log.warning("the engine did not become ready: %s", error)


def _add_metrics(app: FastAPI, state: AppState, more: MoreMetrics | None) -> None:
    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Return metrics in Prometheus' text format, or in OpenMetrics if the Accept header requests it."""
        accept = request.headers.get("accept", "")
        text = state.metrics.exposition(await state.client.call_all("state"), accept)
        text = joined([text] if more is None else [text, await more(accept)])
        return Response(text, headers={"Content-Type": content_type(accept)})


def error_response(path: str, status: int, text: str) -> JSONResponse:
    """Create an error response in the format of the API at ``path``."""
    return JSONResponse(error_body(path, status, text, request_id=request_id.get()), status_code=status)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    status, content = error_response_of(request.url.path, error, request_id.get())
    headers = {"Retry-After": "1"} if isinstance(error, OverloadedError) else None
    return JSONResponse(content, status_code=status, headers=headers)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    """Handle an unexpected exception, whose traceback goes to stderr; this handler runs outside of all middleware."""
    _log.error("the request %s failed: %s", request_id.get(), type(error).__name__)
    response = error_response(request.url.path, 500, f"the server failed: {type(error).__name__}; see its stderr")
    response.headers["Connection"] = "close"  # uvicorn closes the connection after an exception
    add_request_id(response.headers, request.url.path)
    return response


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    method, path, headers = request.method, request.url.path[:200], error.headers or {}
    text = f"{method} {path}: {error.detail}"
    if error.status_code == 404:
        text = f"unknown route: {method} {path}; GET /openapi.json lists the routes"
    elif error.status_code == 405:
        text = f"{method} is not allowed on {path}; use {headers.get('Allow')}"
    response = error_response(request.url.path, error.status_code, text)
    response.headers.update(headers)
    return response
