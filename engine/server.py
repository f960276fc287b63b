"""HTTP server: POST /generate in SGLang's form, GET /health, GET /get_server_info. The only user of FastAPI here."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from json import JSONDecodeError
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from tapscope._version import __version__
from tapscope.engine.llm import LLM
from tapscope.engine.protocol import GenerateRequest, answer
from tapscope.engine.request import Generation
from tapscope.engine.serving import EngineThread
from tapscope.errors import ListenError, LiveError, TapscopeError, UsageError


def make_app(llm: LLM, routers: Sequence[APIRouter] = ()) -> FastAPI:
    """An app whose lifespan runs the engine in a thread; ``routers`` are mounted beside its own routes.

    The app does not close ``llm``. While the app runs nothing else may use ``llm``.
    """
    thread = EngineThread(llm)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        await asyncio.to_thread(thread.stop)

    app = FastAPI(title="tapscope engine", version=__version__, lifespan=lifespan)
    app.add_exception_handler(TapscopeError, _error_response)

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        """Complete one prompt or a batch of them."""
        try:
            body = await request.json()
        except (JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"the body is no JSON: {error}") from None
        return await _generate(thread, GenerateRequest.parse(body), request)

    @app.get("/health")
    async def health() -> Any:
        """200 while the engine can compute, 503 with the reason afterwards."""
        if thread.failure is not None:
            return _error_body(503, str(thread.failure))
        return {"status": "ok"}

    @app.get("/get_server_info")
    async def get_server_info() -> Any:
        """Settings and load."""
        state = await asyncio.wrap_future(thread.call(lambda llm: llm.engine.state()))
        return {"version": __version__} | state

    for router in routers:
        app.include_router(router)
    return app


def serve(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 30000,
    *,
    drain_timeout_s: float = 30.0,
    on_listen: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM (returns) or Ctrl-C (KeyboardInterrupt), finishing the requests under way.

    ``on_listen`` is called with the address, which for port 0 is a free one. Raises ListenError.
    """
    listener = _listen(host, port)
    if on_listen is not None:
        name, bound = listener.getsockname()[:2]
        on_listen(f"http://[{name}]:{bound}" if ":" in name else f"http://{name}:{bound}")
    # uvicorn's own logging writes accesses to stdout, which belongs to data.
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=int(drain_timeout_s))
    with listener, _quiet_sigterm():
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error}; choose another host or port") from None


@contextmanager
def _quiet_sigterm() -> Iterator[None]:
    """uvicorn drains on SIGTERM and then raises it again; that second one shall not kill the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


async def _generate(thread: EngineThread, wanted: GenerateRequest, request: Request) -> Any:
    """Submit all prompts, wait for them or for the client to go; whatever is left then is aborted."""
    started = time.perf_counter()
    names: list[str] = []
    futures: list[Future[Generation]] = []
    try:
        for prompt, request_id in zip(wanted.prompts, wanted.request_ids, strict=True):
            options = {
                "request_id": request_id,
                "max_new_tokens": wanted.max_new_tokens,
                "ignore_eos": wanted.ignore_eos,
            }
            name, future = await asyncio.wrap_future(thread.submit(prompt, options))
            names.append(name)
            futures.append(future)
        generations = await _unless_gone(request, futures)
    finally:
        for name, future in zip(names, futures, strict=True):
            if not future.done():
                thread.abort(name)
    latency_s = time.perf_counter() - started
    answers = [answer(generation, latency_s) for generation in generations]
    return answers if wanted.is_batch else answers[0]


async def _unless_gone(request: Request, futures: list["Future[Generation]"]) -> list[Generation]:
    """The results; raises UsageError when the client hangs up first (nobody reads that answer)."""
    results = asyncio.ensure_future(_all(futures))
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((results, gone), return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise UsageError("the client closed the connection")
        return await results
    finally:
        gone.cancel()
        results.cancel()


async def _all(futures: list["Future[Generation]"]) -> list[Generation]:
    return [await asyncio.wrap_future(future) for future in futures]


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    status = 400 if isinstance(error, UsageError) else 503 if isinstance(error, LiveError) else 500
    return _error_body(status, str(error))


def _error_body(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)
