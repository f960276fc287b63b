"""Guard: who may steer. Loopback is open to this host's programs, not to web pages; elsewhere a token is needed."""

import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tapscope.core.errors import ConfigError, ListenError

TOKEN_VARIABLE = "TAPSCOPE_CONTROL_TOKEN"
_MIN_TOKEN = 8


class Refusal(Exception):
    """A request that is answered at once: an HTTP status, one sentence, and headers."""

    def __init__(self, status: int, error: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Guard:
    """Checks the headers of every request."""

    token: str | None = field(default=None, repr=False)
    """What ``Authorization: Bearer`` must carry; None asks for nothing."""
    loopback_only: bool = False
    """Served on loopback without a token: the request must also have been meant for this host."""

    @classmethod
    def of(cls, host: str, token: str | None) -> "Guard":
        """For a server at ``host``; raises ConfigError where a token is needed or cannot be sent in a header."""
        if token is not None and (len(token) < _MIN_TOKEN or not token.isascii() or not _is_printable(token)):
            raise ConfigError(f"control_token: must be at least {_MIN_TOKEN} printable ASCII characters without blanks")
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"control={host!r}: others can reach this address, so it needs a token; set the environment variable "
                f"{TOKEN_VARIABLE} (or control_token=), or listen on 127.0.0.1"
            )
        return cls(token, loopback_only=token is None)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise Refusal unless the request may be answered."""
        if self.token is not None:
            self._check_token(headers.get("authorization", ""))
            return  # a web page does not know it
        asked = headers.get("host", "").lower()
        if self.loopback_only and asked and not is_loopback(_hostname(asked)):
            raise Refusal(403, f"this is for programs of this host; ask for 127.0.0.1, not for {asked!r}")
        origin = headers.get("origin")
        if origin is not None and (not asked or origin.lower().partition("://")[2] != asked):
            raise Refusal(403, f"a web page of {origin!r} may not steer this job; use a program such as curl")

    def _check_token(self, authorization: str) -> None:
        assert self.token is not None
        scheme, _, given = authorization.partition(" ")
        given_bytes, token = given.strip().encode("utf-8", "replace"), self.token.encode()
        if scheme.lower() != "bearer" or not hmac.compare_digest(given_bytes, token):
            reason = "wrong token" if authorization else "this needs a token"
            text = f"{reason}; send 'Authorization: Bearer TOKEN' (tapscope ctl: {TOKEN_VARIABLE} or --token)"
            raise Refusal(401, text, {"WWW-Authenticate": 'Bearer realm="tapscope"'})


def token_of(configured: str | None) -> str | None:
    """The token that was configured, or the environment's; a blank one is none."""
    return configured or os.environ.get(TOKEN_VARIABLE) or None


def is_loopback(host: str) -> bool:
    """Whether only this host's programs can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``PORT`` (of loopback); raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"address {text!r}: must be HOST:PORT or PORT, e.g. 127.0.0.1:5757 (port 0: any)")
    return host, int(port)


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises ListenError that names the address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ListenError(f"cannot listen on {host}:{port}: {reason}; choose another port (0: any)") from None
    return listener


def _is_printable(token: str) -> bool:
    return token.isprintable() and " " not in token


def _hostname(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return netloc
