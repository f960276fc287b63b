"""Listening: a socket, and uvicorn on it until a signal."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from tapscope.errors import ListenError


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
    listener = listen(host, port)
    if on_listen is not None:
        on_listen(url_of(listener))
    with listener, _quiet_sigterm():
        make_server(app, drain_timeout_s).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises ListenError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error}; choose another host or port") from None


def url_of(listener: socket.socket) -> str:
    """The address that clients ask."""
    name, bound = listener.getsockname()[:2]
    return f"http://[{name}]:{bound}" if ":" in name else f"http://{name}:{bound}"


def make_server(app: ASGIApp, drain_timeout_s: float) -> uvicorn.Server:
    """uvicorn for ``app``; its own logging would write accesses to stdout, which belongs to data."""
    timeout = max(1, round(drain_timeout_s))
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=timeout
    )
    return uvicorn.Server(config)


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
