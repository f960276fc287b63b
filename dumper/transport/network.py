"""Network: how ranks and control clients reach a recorder, on its own host or, with the run's key, from another.

On one host, everyone who may enter the recorder's private directory is admitted (``ipc``). On request the recorder also
opens a TCP port protected by CURVE (CurveZMQ, rfc.zeromq.org/spec/26): both sides prove their key, and everything is
encrypted. The clients' key pair is created for each run and stored in ``recorder.json``, which only the job's user can
read; anyone who can read RUN on another host (shared files, or a copy) may join.
"""

import os
import re
import socket as sockets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from tapscope.core.errors import ConfigError, ListenError, RecorderError, UnreachableError

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_WHERE = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<host>[^:\[\]]+|[^\[\]]*:[^\[\]]*:[^\[\]]*?))(?::(?P<port>\d+))?")
_HEARTBEAT_MS = 1000
_BROKEN_MS = 3000  # a connection without traffic for so long is reestablished
_SLICE_S = 0.25  # how often a waiting caller checks whether the recorder still exists


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A recorder's address, and the keys that it requires (its public one, the run's secret one), if any."""

    address: str
    keys: tuple[bytes, bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, announced: Mapping[str, Any]) -> "Endpoint":
        """From the content of ``recorder.json``; raises RecorderError when it cannot be reached from this host."""
        if is_local(announced):
            return cls(str(announced["address"]))
        network = announced.get("network")
        if not isinstance(network, dict):
            host = announced.get("host")
            raise RecorderError(
                f"the recorder runs on {host} and listens there only; start rank 0 with network=ADDRESS of {host}"
            )
        return cls(str(network["address"]), (str(network["server_key"]).encode(), str(network["secret_key"]).encode()))

    def connect(self, socket: "zmq.Socket[bytes]") -> None:
        """Connect ``socket``; its other options must have been set before."""
        if self.keys is not None:
            server_key, secret_key = self.keys
            socket.curve_serverkey, socket.curve_secretkey = server_key, secret_key
            socket.curve_publickey = zmq.curve_public(secret_key)
            socket.ipv6 = "[" in self.address
            socket.routing_id = os.urandom(16).hex().encode()  # the name by which it is known when it reconnects
            socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _BROKEN_MS
            socket.get_monitor_socket(_FAILED)  # before connecting: a refusal is reported once
        socket.connect(self.address)

    def dealer(self) -> "zmq.Socket[bytes]":
        """A connected DEALER socket that discards unsent messages when it is closed."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        self.connect(socket)
        return socket

    @property
    def has_ended(self) -> bool:
        """Whether nobody listens any more, as far as can be determined without waiting."""
        if not self.address.startswith("ipc://"):
            return False
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.settimeout(_SLICE_S)
            try:
                probe.connect(self.address.removeprefix("ipc://"))
            except (ConnectionRefusedError, FileNotFoundError):
                return True
            except OSError:  # the listen queue is full, so somebody listens
                return False
        return False

    def wait(self, socket: "zmq.Socket[bytes]", timeout_s: float) -> bool:
        """Wait for the first message; False on timeout, UnreachableError when none can come."""
        try:
            for _ in range(max(1, round(timeout_s / _SLICE_S))):
                if self.has_ended:
                    raise UnreachableError("the recorder has ended; its run is closed (see: tapscope info RUN)")
                if socket.poll(timeout=int(min(timeout_s, _SLICE_S) * 1000)):
                    return True
                self._check_refusal(socket)
            return False
        finally:
            if self.keys is not None:
                events = socket.get_monitor_socket(_FAILED)
                socket.disable_monitor()
                events.close(linger=0)

    def _check_refusal(self, socket: "zmq.Socket[bytes]") -> None:
        if self.keys is None:
            return
        from zmq.utils.monitor import recv_monitor_message  # imports asyncio, which takes as long as zmq itself

        events = socket.get_monitor_socket(_FAILED)
        if events.poll(timeout=0):
            reason = str(zmq.Event(recv_monitor_message(events)["event"]).name).lower().replace("_", " ")
            text = f"{self.address} refused the key ({reason}); read the run's recorder.json again"
            raise UnreachableError(text)


def is_local(announced: Mapping[str, Any]) -> bool:
    """Whether the recorder that wrote ``recorder.json`` runs on this host (not just one with the same name)."""
    here = announced.get("host", sockets.gethostname()) == sockets.gethostname()
    return here and (not announced.get("network") or Path(str(announced["address"]).removeprefix("ipc://")).exists())


class NetworkListener:
    """The recorder's TCP port and its keys; clients without the run's key are rejected before any message."""

    def __init__(self, router: "zmq.Socket[bytes]", where: str) -> None:
        """Also bind ``router`` at ``where``, ``HOST`` or ``HOST:PORT``; raises ConfigError or ListenError."""
        from zmq.auth.thread import ThreadAuthenticator

        if not zmq.has("curve"):
            raise ConfigError(f"network={where!r}: this ZeroMQ was built without CURVE; install pyzmq's own wheel")
        host, port = parse_network(where)
        server_key, server_secret = zmq.curve_keypair()
        self._client_key, self._client_secret = zmq.curve_keypair()
        self._authenticator = ThreadAuthenticator(router.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)
        router.curve_server, router.curve_secretkey = True, server_secret
        router.ipv6 = ":" in host
        try:
            router.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise ListenError(f"network={where!r}: cannot listen there: {error.strerror}") from None
        self.address = str(router.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        self._server_key = server_key

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator: accepts only the run's own key."""
        return key == self._client_key

    def description(self) -> dict[str, str]:
        """For ``recorder.json``."""
        keys = {"server_key": self._server_key.decode(), "secret_key": self._client_secret.decode()}
        return {"address": self.address, **keys}

    def close(self) -> None:
        """End the authenticator's thread."""
        self._authenticator.stop()


def parse_network(where: str) -> tuple[str, str]:
    """The numeric address and the port (``*``: any) of ``HOST`` or ``HOST:PORT``; raises ConfigError."""
    match = _WHERE.fullmatch(where)
    if match is None or int(match["port"] or 0) > 65535:
        raise ConfigError(f"network={where!r}: must be HOST or HOST:PORT, e.g. 10.0.0.5 (uses a free port)")
    host = match["bracketed"] or match["host"]
    if host in ("0.0.0.0", "::", "*"):
        raise ConfigError(f"network={where!r}: name the address by which the other hosts reach this one, e.g. 10.0.0.5")
    try:
        numeric = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"network={where!r}: the host is not known: {error}") from None
    return str(numeric), match["port"] if int(match["port"] or 0) else "*"


def write_private(path: Path, text: str) -> None:
    """Replace ``path`` atomically by a file that only this user can read."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
