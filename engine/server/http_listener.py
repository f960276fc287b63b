"""Runs an app with uvicorn on a listening socket."""

import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from tapscope.engine.server.server_settings import ServerSettings
from tapscope.http.connection import ConnectionLimits, bounded
from tapscope.http.listen import listen, url_of

_OTHER_FILES = 128  # open files that are not connections
_ACCEPTED_AT_ONCE = 32
BACKLOG = 1024
"""Connections in the kernel's queue that wait to be accepted."""


def serve(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 30000,
    *,
    settings: ServerSettings | None = None,
    on_listen: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM (returns) or Ctrl-C (KeyboardInterrupt), finishing live requests.

    ``on_listen`` is called with the address, which for port 0 is a free one. Raises ListenError.
    """
    listener = listen(host, port, backlog=BACKLOG)
    if on_listen is not None:
        on_listen(url_of(listener))
    with listener, _quiet_sigterm():
        make_server(app, settings or ServerSettings()).run(sockets=[listener])


def make_server(app: ASGIApp, settings: ServerSettings) -> uvicorn.Server:
    """A uvicorn server for ``app``, without uvicorn's logging, which would write to stdout."""
    limits = ConnectionLimits(
        max_connections=_max_connections(settings.max_connections), request_s=settings.request_timeout_s
    )
    config = uvicorn.Config(
        app,
        http=bounded(limits),
        ws="none",
        backlog=min(max(limits.max_connections // 2, 1), _ACCEPTED_AT_ONCE),  # too many would evict each other
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
    )
    return Server(config)


class Server(uvicorn.Server):
    """Accepts a few connections at a time, so that a burst does not block the event loop; others wait in the kernel."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start with a small backlog, which is asyncio's number of accepts per iteration, then raise the kernel's."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def _max_connections(connections: int) -> int:
    """``connections``, or as many as the limit of open files allows, after raising the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(soft - _OTHER_FILES, 1)
    return connections


@contextmanager
def _quiet_sigterm() -> Iterator[None]:
    """Ignore the SIGTERM that uvicorn raises again after draining."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
