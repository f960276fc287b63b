"""Endpoints: the sockets of the recorder for ranks, control clients and live views."""

import contextlib
import fcntl
import json
import os
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from tapscope.core import wire
from tapscope.core.errors import ConfigError
from tapscope.core.regular_files import open_regular
from tapscope.core.tempdirs import make_tempdir, remove_tempdir
from tapscope.core.wire import Message
from tapscope.dumper.transport.network import NetworkListener, write_private
from tapscope.run_format.directory import RECORDER_FILE
from tapscope.run_format.manifest import LOCK

if TYPE_CHECKING:
    from tapscope.dumper.control.control_app import ControlServer


class Endpoints:
    """A ROUTER socket for ranks and control clients, a PUB socket for live views; optionally a TCP port and HTTP."""

    def __init__(self) -> None:
        self._home = _private_directory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 1000
        self._router.router_handover = True  # a rank that reconnects keeps its identity
        self._router.sndhwm = 0  # no high-water mark: a ROUTER would silently drop acknowledgments
        self._live = self._context.socket(zmq.PUB)
        self._live.linger = 0
        self.address = f"ipc://{self._home}/recorder"
        self.live_address = f"ipc://{self._home}/live"
        self._router.bind(self.address)
        self._live.bind(self.live_address)
        self._network: NetworkListener | None = None
        self._server: ControlServer | None = None
        self.http: str | None = None
        """``HOST:PORT`` of the HTTP control server; None if it is off."""

    def open(self, options: dict[str, Any]) -> None:
        """Open the TCP port and the HTTP server if ``options`` request them; raises ConfigError or ListenError."""
        if (where := options.get("network")) is not None:
            self._network = NetworkListener(self._router, where)
        if (control := options.get("control")) is not None:
            self._open_http(control, options.get("control_token"))

    def _open_http(self, control: str, token: str | None) -> None:
        from tapscope.dumper.control.access_guard import Guard
        from tapscope.dumper.control.control_app import ControlServer, make_app
        from tapscope.dumper.control.control_client import ControlClient
        from tapscope.http.listen import listen, parse_address, url_of

        if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
            needed = " and ".join(missing)
            raise ConfigError(
                f"control={control!r}: needs {needed}; install tapscope[capture], or use tapscope ctl RUN"
            )
        host, port = parse_address(control)
        guard = Guard.of(host, token)
        bound = listen(host, port)
        self.http = url_of(bound).removeprefix("http://")
        self._server = ControlServer(lambda: make_app(ControlClient(self.address), guard), bound)
        self._server.start()

    def description(self) -> dict[str, Any]:
        """Return the content of ``recorder.json``: the addresses to connect to, and the key of the TCP port if open."""
        content = {"pid": os.getpid(), "host": socket.gethostname(), "wire": wire.VERSION, "http": self.http}
        content |= {"address": self.address, "live": self.live_address}
        return content | {"network": self._network.description() if self._network else None}

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for a message; return whether one is available."""
        return bool(self._router.poll(timeout=int(timeout_s * 1000)))

    def receive(self) -> tuple[bytes, list[Any]] | None:
        """Return (identity of the sender, frames) of the next message, without waiting; None if there is none."""
        try:
            frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return frames[0].bytes, [frames[1].buffer, *frames[2:]] if len(frames) > 1 else []

    def send(self, identity: bytes, message: Message) -> None:
        """Send a message to a rank or control client; dropped if the peer is gone."""
        self._router.send_multipart([identity, *wire.encode(message)])

    def publish(self, message: Message) -> None:
        """Publish a message to the live views; subscribers that are too slow lose messages."""
        self._live.send_multipart([b"live", *wire.encode(message)])

    def close(self) -> None:
        """Close all sockets and wait until the last messages are sent, which would be lost if the process exited."""
        self._router.close()  # before the control server stops, so that it answers pending requests with status 503
        self._live.close()
        if self._network is not None:
            self._network.close()
        remove_tempdir(self._home)
        if self._server is not None:
            self._server.stop()
        self._context.term()


class RecorderFile:
    """The ``recorder.json`` with the recorder's address, in each run that this process writes."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._runs: list[Path] = []

    def write(self, run: Path) -> None:
        """Write ``recorder.json`` into ``run``, readable by this user only; raises OSError."""
        self._runs.append(run)
        write_private(run / RECORDER_FILE, json.dumps(self._endpoints.description()))

    def write_locked(self, run: Path) -> None:
        """Lock a run opened by a reset against other recorders, then write ``recorder.json``; raises OSError."""
        lock = open_regular(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process exits
        self.write(run)

    def remove(self) -> None:
        """Remove ``recorder.json`` from every run, so that no process tries to join any more."""
        for run in self._runs:
            with contextlib.suppress(OSError):
                (run / RECORDER_FILE).unlink(missing_ok=True)


def _private_directory() -> Path:
    """Create a directory of mode 0700 for Unix sockets, whose paths are limited to 107 bytes."""
    short = len(tempfile.gettempdir()) < 60
    return make_tempdir(None if short else Path("/tmp"))
