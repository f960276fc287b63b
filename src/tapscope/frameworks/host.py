"""Shared by the server entry points: whether the environment requests a capture, and containment of tapscope's
errors."""

import contextlib
import logging
import os
from collections.abc import Iterator

from tapscope.core.errors import RecorderError

_log = logging.getLogger("tapscope")
reported: set[str] = set()
"""Operations whose failure was logged; each is logged once."""


def is_wanted() -> bool:
    """Return whether ``TAPSCOPE_ENABLED`` or ``TAPSCOPE_CONTROL`` is set; imports nothing."""
    return any(os.environ.get(name, "").strip() for name in ("TAPSCOPE_ENABLED", "TAPSCOPE_CONTROL"))


@contextlib.contextmanager
def guarded(host: str, what: str) -> Iterator[None]:
    """Context manager: log an exception of ``what`` once and continue, so that the host is not affected.

    RecorderError propagates: ``strict`` backpressure is meant to stop the server.
    """
    try:
        yield
    except RecorderError:
        raise
    except Exception as error:  # noqa: BLE001 - the server must continue
        if what not in reported:
            reported.add(what)
            _log.error("tapscope: %s failed (%s: %s); %s continues", what, type(error).__name__, error, host)
