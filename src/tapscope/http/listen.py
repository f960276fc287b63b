"""Addresses and listening sockets."""

import ipaddress
import socket

from tapscope.core.errors import ConfigError, ListenError


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address, which is reachable only from the same host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str, *, flag: str = "address") -> tuple[str, int]:
    """Parse ``HOST:PORT`` or ``PORT`` (on 127.0.0.1) to (host, port); the ConfigError names ``flag``."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{flag} {text!r}: must be HOST:PORT or PORT, e.g. 127.0.0.1:5757 (port 0: any)")
    return host, int(port)


def listen(host: str, port: int, *, backlog: int = 128) -> socket.socket:
    """Open a listening TCP socket; the ListenError names the address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(backlog)
    except (OSError, OverflowError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ListenError(f"cannot listen on {host}:{port}: {reason}; choose another host or port (0: any)") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    name, bound = listener.getsockname()[:2]
    return f"http://[{name}]:{bound}" if ":" in name else f"http://{name}:{bound}"
