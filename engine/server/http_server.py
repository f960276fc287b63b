"""The front: the process of HTTP, tokenizer and text. Holds no torch.

Its parent, the engine's process, gives it two descriptors: the listening socket, and a channel of JSON lines. The
channel says what to serve, then which replica is lost, and to drain; its end means that the other side is no more.
"""

import asyncio
import json
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
"""Exit code of a front whose engine ended before it."""

_SWITCH_S = 0.001  # for which the event loop waits, each time it goes on, while a thread builds a large answer


class Extras(NamedTuple):
    """What a host adds to the app."""

    routers: Sequence[APIRouter] = ()
    more_metrics: MoreMetrics | None = None


MakeExtras = Callable[[dict[str, Any], AppState], Extras]
"""Given what the parent put under ``extras``, and what the routes share."""


def http_server_main(make_extras: MakeExtras | None = None) -> int:
    """Body of the process: serve until told to drain, or until the engine's process ends. Returns the exit code."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    sys.setswitchinterval(_SWITCH_S)
    with channel, listener:
        welcome = json.loads(channel.makefile("rb").readline())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
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
    async def connect(meters: LatencyMetrics) -> AsyncIterator[EngineClient]:
        with zmq.Context() as context:
            client = EngineClient(context, addresses, tokenizer, meters, prefix_affinity=welcome["prefix_affinity"])
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
    server = _HttpServer(make_server(_cut_off_quietly(app), state.settings).config)
    channel.setblocking(False)
    loop, code, lines = asyncio.get_running_loop(), 0, _Lines()

    def on_channel() -> None:
        nonlocal code
        if received := _read(channel):
            for line in lines.push(received):
                if line["do"] == "drain":
                    server.drain()
                else:
                    state.client.replicas[line["dp_rank"]].fail(line["reason"])
            return
        loop.remove_reader(channel)
        if not server.should_exit:
            code = ENGINE_LOST
            print("tapscope: error: the engine's process has ended; so does the server", file=sys.stderr, flush=True)
            state.client.fail("the engine's process has ended")
            server.drain()

    loop.add_reader(channel, on_channel)
    loop.add_signal_handler(signal.SIGTERM, server.drain)
    watch = _watch_engine(state, watched)
    try:
        await server.serve(sockets=[listener])
    finally:
        await asyncio.to_thread(watch.stop)
    if code == ENGINE_LOST:
        shutil.rmtree(watched["folder"], ignore_errors=True)  # the one who made it is no more
    return code if server.started else 1


def _watch_engine(state: AppState, watched: dict[str, Any]) -> WatchdogThread:
    """Should the process of replica 0 hang: say so to whoever waits for it, and end it after a while."""
    loop, pid, folder = asyncio.get_running_loop(), watched["pid"], Path(watched["folder"])

    def say(hangs: str) -> None:
        text = f"the engine's process {pid} {hangs}"
        then = f"the server answers 503 and ends in {LINGER_S:g} s"
        print(f"tapscope: error: {text}\n{then}", file=sys.stderr, flush=True)
        replica = state.client.replicas[0]
        replica.fail(replica.named(text))
        loop.call_later(LINGER_S, _kill, pid)

    watch = Watchdog(
        {0: WatchedProcess(pid, Heartbeat(heartbeat_path(folder, 0)), stack_path(folder, 0))}, watched["limit_s"]
    )
    return WatchdogThread(watch, lambda _, hangs: loop.call_soon_threadsafe(say, hangs))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _cut_off_quietly(app: ASGIApp) -> ASGIApp:
    """uvicorn cancels what outlives the drain and says so in a line; a traceback for each would say no more."""

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise

    return quiet


def _read(channel: socket.socket) -> bytes:
    """What has come; nothing once the other side is no more."""
    try:
        return channel.recv(4096)
    except ConnectionError:
        return b""


class _Lines:
    """JSON lines out of bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, received: bytes) -> list[dict[str, Any]]:
        """The lines that are whole now."""
        *whole, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in whole]


class _HttpServer(Server):
    """A server that sleeps while nothing happens: its own loop wakes ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def drain(self) -> None:
        """Take no more connections, finish what is under way, return."""
        self.should_exit = True
        self._ended.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for :func:`_serve`."""
        yield

    async def main_loop(self) -> None:
        """Wait for :meth:`drain`."""
        await self._ended.wait()
