"""Network: connect ranks and control clients to a recorder on the same host or, with the run's key, on another host.

On the same host, clients connect through ``ipc``; access is controlled by the permissions of the recorder's private
directory. Optionally the recorder also opens a TCP port protected by CURVE (CurveZMQ, rfc.zeromq.org/spec/26): both
sides authenticate with keys, and all traffic is encrypted. The clients' key pair is created per run and stored in
``recorder.json``, which only the job's user can read; any process that can read RUN on another host (shared file system
or a copy) can join.
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
_BROKEN_MS = 3000  # a connection without traffic for this long is re-established
_SLICE_S = 0.25  # interval at which a waiting caller checks whether the recorder still exists


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a recorder and, for TCP, the keys to connect: (public key of the recorder, secret key of the run)."""

    address: str
    keys: tuple[bytes, bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, announced: Mapping[str, Any]) -> "Endpoint":
        """Build the endpoint from ``recorder.json``; raises RecorderError if it is not reachable from this host."""
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
        """Connect ``socket``; all its other options must be set before."""
        if self.keys is not None:
            server_key, secret_key = self.keys
            socket.curve_serverkey, socket.curve_secretkey = server_key, secret_key
            socket.curve_publickey = zmq.curve_public(secret_key)
            socket.ipv6 = "[" in self.address
            socket.routing_id = os.urandom(16).hex().encode()  # keeps the identity across reconnects
            socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _BROKEN_MS
            socket.get_monitor_socket(_FAILED)  # before connecting, because a refusal is reported only once
        socket.connect(self.address)

    def dealer(self) -> "zmq.Socket[bytes]":
        """Return a connected DEALER socket that discards unsent messages when closed."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        self.connect(socket)
        return socket

    @property
    def has_ended(self) -> bool:
        """Whether no process listens at the address any more; False for TCP, where this cannot be checked quickly."""
        if not self.address.startswith("ipc://"):
            return False
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.settimeout(_SLICE_S)
            try:
                probe.connect(self.address.removeprefix("ipc://"))
            except (ConnectionRefusedError, FileNotFoundError):
                return True
            except OSError:  # the listen queue is full, so a process listens
                return False
        return False

    def wait(self, socket: "zmq.Socket[bytes]", timeout_s: float) -> bool:
        """Wait for the first message; return False on timeout.

        Raises UnreachableError if the recorder has ended or refused the key.
        """
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
        from zmq.utils.monitor import recv_monitor_message  # imports asyncio, which doubles the import time of zmq

        events = socket.get_monitor_socket(_FAILED)
        if events.poll(timeout=0):
            reason = str(zmq.Event(recv_monitor_message(events)["event"]).name).lower().replace("_", " ")
            text = f"{self.address} refused the key ({reason}); read the run's recorder.json again"
            raise UnreachableError(text)


def is_local(announced: Mapping[str, Any]) -> bool:
    """Return whether the recorder that wrote ``recorder.json`` runs on this host, not just on one of the same name."""
    here = announced.get("host", sockets.gethostname()) == sockets.gethostname()
    return here and (not announced.get("network") or Path(str(announced["address"]).removeprefix("ipc://")).exists())


class NetworkListener:
    """The recorder's TCP port and keys; clients without the run's key are rejected during the handshake."""

    def __init__(self, router: "zmq.Socket[bytes]", where: str) -> None:
        """Bind ``router`` additionally to ``where`` (``HOST`` or ``HOST:PORT``); raises ConfigError or ListenError."""
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
        """Return whether ``key`` is the run's client key; called by the authenticator."""
        return key == self._client_key

    def description(self) -> dict[str, str]:
        """Return the address and keys for ``recorder.json``."""
        keys = {"server_key": self._server_key.decode(), "secret_key": self._client_secret.decode()}
        return {"address": self.address, **keys}

    def close(self) -> None:
        """Stop the authenticator's thread."""
        self._authenticator.stop()


def parse_network(where: str) -> tuple[str, str]:
    """Resolve ``HOST`` or ``HOST:PORT`` to (numeric address, port); the port is ``*`` if not given.

    Raises ConfigError for invalid syntax, an unknown host, and a wildcard address.
    """
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
    """Replace ``path`` atomically with a file of mode 0600 that contains ``text``."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
