"""Guard: access control for the control routes.

On loopback, programs of this host have access without a token, but web pages do not. Other hosts need a token.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tapscope.core.errors import ConfigError
from tapscope.http.access import check_loopback_host, check_origin, check_token
from tapscope.http.listen import is_loopback

TOKEN_VARIABLE = "TAPSCOPE_CONTROL_TOKEN"
_MIN_TOKEN = 8
_HINT = f"'Authorization: Bearer TOKEN' (tapscope ctl: {TOKEN_VARIABLE} or --token)"


@dataclass(frozen=True, slots=True)
class Guard:
    """Checks the headers of every request."""

    token: str | None = field(default=None, repr=False)
    """Token required in ``Authorization: Bearer``; None disables the check."""
    loopback_only: bool = False
    """Whether the server listens on loopback without a token; the Host header must then be a loopback name."""

    @classmethod
    def of(cls, host: str, token: str | None, *, flag: str = "") -> "Guard":
        """Return the guard for a server that listens on ``host``; raises ConfigError.

        ``flag`` is the command-line flag that gave the host (``--listen 0.0.0.0:8000``), if it was not the setting
        ``control``. Errors: a required token is missing, or the token cannot be sent in a header.
        """
        if token is not None and (len(token) < _MIN_TOKEN or not token.isascii() or not _is_printable(token)):
            raise ConfigError(f"control_token: must be at least {_MIN_TOKEN} printable ASCII characters without blanks")
        if token is None and not is_loopback(host):
            where, setting = (f"{flag}: ", "") if flag else ("", " (or control_token=)")
            raise ConfigError(
                f"{where}other hosts can reach {host}, so the control routes need a token; set the environment "
                f"variable {TOKEN_VARIABLE}{setting}, or listen on 127.0.0.1"
            )
        return cls(token, loopback_only=token is None)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused unless the request is permitted."""
        if self.token is not None:
            check_token(headers, self.token, hint=_HINT)  # a web page does not know the token
            return
        if self.loopback_only:
            check_loopback_host(headers)
        check_origin(headers)


def token_of(configured: str | None) -> str | None:
    """Return the configured token, otherwise that of TAPSCOPE_CONTROL_TOKEN; None if both are unset or empty."""
    return configured or os.environ.get(TOKEN_VARIABLE) or None


def _is_printable(token: str) -> bool:
    return token.isprintable() and " " not in token
