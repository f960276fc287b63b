"""What the entry points for servers share: whether the environment asks for a capture, and errors of ours in a host."""

import contextlib
import logging
import os
from collections.abc import Iterator

from tapscope.core.errors import RecorderError

_log = logging.getLogger("tapscope")
reported: set[str] = set()
"""Errors that were logged; each is logged once."""


def is_wanted() -> bool:
    """Whether ``TAPSCOPE_ENABLED`` or ``TAPSCOPE_CONTROL`` is set; costs no import."""
    return any(os.environ.get(name, "").strip() for name in ("TAPSCOPE_ENABLED", "TAPSCOPE_CONTROL"))


@contextlib.contextmanager
def guarded(host: str, what: str) -> Iterator[None]:
    """Log an error of ours once and go on; ``strict`` backpressure is meant to stop the server."""
    try:
        yield
    except RecorderError:
        raise
    except Exception as error:  # noqa: BLE001 - the server must go on
        if what not in reported:
            reported.add(what)
            _log.error("tapscope: %s failed (%s: %s); %s continues", what, type(error).__name__, error, host)
