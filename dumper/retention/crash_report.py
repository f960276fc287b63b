"""CrashReport: writes the exception that ended a step or run as an event of the run."""

import sys
import traceback
from collections.abc import Callable
from typing import Any

_MAX_TRACEBACK = 16_000
"""Maximum length in characters; the innermost frames are kept."""
_MAX_EVENTS = 100
_MAX_MESSAGE = 2_000


class CrashReport:
    """Writes one event with a traceback per exception, up to 100 events."""

    def __init__(self, put_event: Callable[..., None]) -> None:
        self._put_event = put_event
        self._reported: int | None = None
        self._num_written = 0

    def write(self, error: BaseException | None, step: int | None) -> None:
        """Write an event for ``error``, unless ``error`` was also the last one written; never raises."""
        if error is None or id(error) == self._reported or self._num_written >= _MAX_EVENTS:
            return
        self._reported = id(error)
        self._num_written += 1
        try:
            self._put_event("crash", **_fields(error), step=step)
        except Exception:  # noqa: BLE001 - the user's __str__ or __repr__ may raise
            self._put_event("crash", exception=type(error).__name__, message="", where="", traceback="", step=step)


def active_error() -> BaseException | None:
    """Return the exception that is being handled or that ended the program; None if there is none."""
    return sys.exception() or getattr(sys, "last_value", None)


def _fields(error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return {
        "exception": type(error).__name__,
        "message": str(error)[:_MAX_MESSAGE],
        "where": where,
        "traceback": text if len(text) <= _MAX_TRACEBACK else f"…{text[-_MAX_TRACEBACK:]}",
    }
