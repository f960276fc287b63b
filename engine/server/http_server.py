"""The HTTP process: HTTP, tokenizer and detokenizer, without torch.

The parent, which is the engine process, passes two file descriptors: the listening socket, and a channel of JSON lines.
The first line contains the settings; later lines report a lost replica or request a drain. End of file means that the
parent has exited.
"""

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
import zmq
from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from tapscope.core.errors import TapscopeError
from tapscope.core.formatting import printable
from tapscope.core.gc_control import freeze
from tapscope.engine.distributed.heartbeat import Heartbeat, heartbeat_path
from tapscope.engine.distributed.watchdog import Watchdog, WatchdogThread, WatchedProcess, stack_path
from tapscope.engine.runners.engine_client import EngineClient
from tapscope.engine.runners.latency_metrics import LatencyMetrics
from tapscope.engine.server.app import MoreMetrics, build_app
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.http_listener import Server, make_server
from tapscope.engine.server.server_process import LINGER_S
from tapscope.engine.server.server_settings import ServerSettings
from tapscope.engine.text.tokenizer import Tokenizer

ENGINE_LOST = 4
"""Exit code if the engine process has ended."""

_ANSWER_S = 2.0
"""Seconds for sending errors to the requests that the drain timeout has ended."""
_SWITCH_S = 0.001  # GIL switch interval: bounds the event loop's delay while a thread builds a large response


class Extras(NamedTuple):
    """Routes and metrics that a host program adds to the app."""

    routers: Sequence[APIRouter] = ()
    more_metrics: MoreMetrics | None = None


MakeExtras = Callable[[dict[str, Any], AppState], Extras]
"""Function that creates the :class:`Extras` from the parent's ``extras`` (JSON values) and the app's state."""


def http_server_main(make_extras: MakeExtras | None = None) -> int:
    """Entry point: serve until drained or until the engine process ends; return the exit code."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    sys.setswitchinterval(_SWITCH_S)
    with channel, listener:
        welcome = json.loads(channel.makefile("rb").readline())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
        try:
            return _run(welcome, listener, channel, make_extras)
        except TapscopeError as error:
            print(f"tapscope: error: {printable(str(error))}", file=sys.stderr, flush=True)
            return error.exit_code


def _run(
    welcome: dict[str, Any],
    listener: socket.socket,
    channel: socket.socket,
    make_extras: MakeExtras | None,
) -> int:
    addresses = welcome["addresses"]
    state = AppState(welcome["model"], ServerSettings(**welcome["settings"]), len(addresses))
    tokenizer = Tokenizer.find(Path(welcome["model"]))

    @asynccontextmanager
    async def connect(latency_metrics: LatencyMetrics) -> AsyncIterator[EngineClient]:
        with zmq.Context() as context:
            client = EngineClient(
                context, addresses, tokenizer, latency_metrics, prefix_affinity=welcome["prefix_affinity"]
            )
            try:
                yield client
            finally:
                client.close()

    extras = Extras() if make_extras is None else make_extras(welcome["extras"], state)
    app = build_app(state, connect, extras.routers, extras.more_metrics)
    freeze()
    return asyncio.run(_serve(app, listener, channel, state, welcome["watched"]))


async def _serve(
    app: FastAPI, listener: socket.socket, channel: socket.socket, state: AppState, watched: dict[str, Any]
) -> int:
    drain_s = state.settings.drain_timeout_s
    config = make_server(_without_cancel_traceback(app), state.settings).config
    config.timeout_graceful_shutdown = math.ceil(drain_s + _ANSWER_S)  # after this, uvicorn cuts responses off
    server = _HttpServer(config)
    channel.setblocking(False)
    loop, code, lines = asyncio.get_running_loop(), 0, _Lines()

    def drain() -> None:
        if not server.should_exit:
            server.drain()
            loop.call_later(drain_s, on_drain_timeout)

    def on_drain_timeout() -> None:
        if server.started and state.client.num_live:
            text = f"the server shuts down, and the request did not finish within {drain_s:g} s (--drain-timeout)"
            print(
                f"tapscope: {state.client.num_live} generations end with an error: {text}", file=sys.stderr, flush=True
            )
            state.client.fail(text)

    def on_channel() -> None:
        nonlocal code
        if received := _read(channel):
            for line in lines.push(received):
                if line["do"] == "drain":
                    drain()
                else:
                    state.client.replicas[line["dp_rank"]].fail(line["reason"])
            return
        loop.remove_reader(channel)
        if not server.should_exit:
            code = ENGINE_LOST
            loop.run_in_executor(None, watch.finish_check).add_done_callback(on_engine_ended)

    def on_engine_ended(_: asyncio.Future[None]) -> None:
        print("tapscope: error: the engine's process has ended; the server exits", file=sys.stderr, flush=True)
        state.client.fail("the engine's process has ended")
        server.drain()

    watch = _watch_engine(state, watched)
    loop.add_reader(channel, on_channel)
    loop.add_signal_handler(signal.SIGTERM, drain)
    try:
        await server.serve(sockets=[listener])
    finally:
        await asyncio.to_thread(watch.stop)
    if code == ENGINE_LOST:
        shutil.rmtree(watched["folder"], ignore_errors=True)  # the process that created the folder has ended
    return code if server.started else 1


def _watch_engine(state: AppState, watched: dict[str, Any]) -> WatchdogThread:
    """Watch the process of replica 0: if it hangs, fail its requests and kill the process after ``LINGER_S``."""
    loop, pid, folder = asyncio.get_running_loop(), watched["pid"], Path(watched["folder"])

    def on_hung(diagnosis: str) -> None:
        text = f"the engine's process {pid} {diagnosis}"
        then = f"the server answers 503 and ends in {LINGER_S:g} s"
        print(f"tapscope: error: {text}\n{then}", file=sys.stderr, flush=True)
        replica = state.client.replicas[0]
        replica.fail(replica.named(text))
        loop.call_later(LINGER_S, _kill, pid)

    watch = Watchdog(
        {0: WatchedProcess(pid, Heartbeat(heartbeat_path(folder, 0)), stack_path(folder, 0))}, watched["limit_s"]
    )
    return WatchdogThread(watch, lambda _, diagnosis: loop.call_soon_threadsafe(on_hung, diagnosis))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _without_cancel_traceback(app: ASGIApp) -> ASGIApp:
    """Suppress the traceback of each request that uvicorn cancels after the drain timeout; uvicorn logs one line."""

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise

    return quiet


def _read(channel: socket.socket) -> bytes:
    """Return the received bytes; empty once the parent has exited."""
    try:
        return channel.recv(4096)
    except ConnectionError:
        return b""


class _Lines:
    """Incremental decoder of JSON lines."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, received: bytes) -> list[dict[str, Any]]:
        """Return the decoded lines that ``received`` completes."""
        *whole, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in whole]


class _HttpServer(Server):
    """A server whose main loop blocks while idle; uvicorn's own loop wakes up ten times per second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def drain(self) -> None:
        """Stop accepting connections and let the server exit once live requests have finished."""
        self.should_exit = True
        self._ended.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: :func:`_serve` handles signals."""
        yield

    async def main_loop(self) -> None:
        """Wait for :meth:`drain`."""
        await self._ended.wait()
