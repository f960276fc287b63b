"""Who may send requests: checks of a request's headers that every HTTP server of tapscope makes.

A server on loopback needs no token, but a browser on this host would forward requests of web pages to it: pages of
another origin are refused, and so are names made to point here (DNS rebinding).
"""

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from tapscope.http.listen import is_loopback


class RequestRefused(Exception):
    """A request that is rejected immediately with an HTTP status, one sentence, and headers."""

    def __init__(self, status: int, error: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.headers = dict(headers or {})


def check_origin(headers: Mapping[str, str]) -> None:
    """Raise RequestRefused (403) for a request of a web page that comes from another origin."""
    origin, host = headers.get("origin"), headers.get("host", "").lower()
    if origin is not None and (not host or origin.lower().partition("://")[2] != host):
        raise RequestRefused(403, f"cross-origin request from {origin[:200]!r} refused; use a program such as curl")


def check_loopback_host(headers: Mapping[str, str]) -> None:
    """Raise RequestRefused (403) for a request that was meant for a name other than this host's loopback."""
    asked = headers.get("host", "").lower()
    if asked and not is_loopback(_hostname(asked)):
        raise RequestRefused(403, f"only programs of this host may use this server; ask for 127.0.0.1, not {asked!r}")


def check_token(
    headers: Mapping[str, str], token: str, *, names: tuple[str, ...] = (), what: str = "token", hint: str
) -> None:
    """Raise RequestRefused (401) unless ``Authorization: Bearer`` or one of the headers ``names`` carries the token."""
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
