"""Access control: header checks that every HTTP server of tapscope applies to requests.

A server on loopback requires no token, but a browser on the same host would forward requests of arbitrary web pages.
Requests from other origins are therefore rejected, and so are host names that resolve to this host (DNS rebinding).
"""

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from tapscope.http.listen import is_loopback


class RequestRefused(Exception):
    """Raised to reject a request with an HTTP status, a one-sentence error message, and response headers."""

    def __init__(self, status: int, error: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.headers = dict(headers or {})


def check_origin(headers: Mapping[str, str]) -> None:
    """Raise RequestRefused (403) for a request that a web page of another origin sends."""
    origin, host = headers.get("origin"), headers.get("host", "").lower()
    if origin is not None and (not host or origin.lower().partition("://")[2] != host):
        raise RequestRefused(403, f"cross-origin request from {origin[:200]!r} refused; use a program such as curl")


def check_loopback_host(headers: Mapping[str, str]) -> None:
    """Raise RequestRefused (403) if the Host header names a host other than loopback."""
    host = headers.get("host", "").lower()
    if host and not is_loopback(_hostname(host)):
        raise RequestRefused(403, f"only programs of this host may use this server; ask for 127.0.0.1, not {host!r}")


def check_token(
    headers: Mapping[str, str], token: str, *, names: tuple[str, ...] = (), what: str = "token", hint: str
) -> None:
    """Raise RequestRefused (401) unless ``Authorization: Bearer`` or one of the headers ``names`` has the token.

    ``what`` and ``hint`` describe the token in the error message.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = next((value for name in names if (value := headers.get(name))), "")
    given = given or (bearer.strip() if scheme.lower() == "bearer" else "")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
        problem = f"wrong {what}" if given or scheme else f"this needs {'an' if what[0] in 'aeiouA' else 'a'} {what}"
        raise RequestRefused(401, f"{problem}; send {hint}", {"WWW-Authenticate": 'Bearer realm="tapscope"'})


def _hostname(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return netloc
