"""Run an app with uvicorn on a listening socket."""

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

_OTHER_FILES = 128  # file descriptors reserved for purposes other than connections
_ACCEPTED_AT_ONCE = 32
BACKLOG = 1024
"""Length of the kernel's queue of connections that wait to be accepted."""


def serve(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 30000,
    *,
    settings: ServerSettings | None = None,
    on_listen: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM (returns) or Ctrl-C (raises KeyboardInterrupt), finishing live requests first.

    ``on_listen`` is called with the server's URL; port 0 selects a free port. Raises ListenError.
    """
    listener = listen(host, port, backlog=BACKLOG)
    if on_listen is not None:
        on_listen(url_of(listener))
    with listener, _quiet_sigterm():
        make_server(app, settings or ServerSettings()).run(sockets=[listener])


def make_server(app: ASGIApp, settings: ServerSettings) -> uvicorn.Server:
    """Create a uvicorn server for ``app``, without uvicorn's logging, which would write to stdout."""
    limits = ConnectionLimits(
        max_connections=_max_connections(settings.max_connections), request_s=settings.request_timeout_s
    )
    config = uvicorn.Config(
        app,
        http=bounded(limits),
        ws="none",
        backlog=min(max(limits.max_connections // 2, 1), _ACCEPTED_AT_ONCE),  # more would evict one another
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
    )
    return Server(config)


class Server(uvicorn.Server):
    """Uvicorn server that accepts only a few connections per event loop iteration.

    A burst of connections then does not block the event loop: the rest wait in the kernel's queue.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start with a small backlog, which limits asyncio's accepts per iteration, then raise the kernel's backlog."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def _max_connections(connections: int) -> int:
    """Return ``connections``, or fewer if the open file limit requires it; raises the soft limit as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(soft - _OTHER_FILES, 1)
    return connections


@contextmanager
def _quiet_sigterm() -> Iterator[None]:
    """Context manager: ignore the SIGTERM that uvicorn raises again after draining."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
