"""RequestLog: a log with one JSON line per finished request, without prompts and outputs."""

import json
import logging
import os
import time
from pathlib import Path

from tapscope.core.errors import ConfigError
from tapscope.engine.requests.output import Output
from tapscope.engine.runners.latency_metrics import RequestTimer
from tapscope.engine.server.request_id import request_id

_log = logging.getLogger(__name__)


class RequestLog:
    """Request listener that appends to a log file, one write per line.

    Several servers may share the file (POSIX O_APPEND).
    """

    def __init__(self, path: str) -> None:
        """Open the file, creating it with mode 0600 if needed; raises ConfigError."""
        self._path = Path(path)
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            raise ConfigError(f"request_log={path!r}: cannot be written: {error}") from None
        self._is_failing = False

    def on_output(self, timer: RequestTimer, output: Output) -> None:
        """Ignore the output: the line is written when the request ends."""

    def ended(self, request: str, prompt_tokens: int, timer: RequestTimer) -> None:
        """Write the request's line. Errors such as a full disk are logged once and do not affect the request."""
        line = {
            "time": time.time(),
            "id": request,
            "x_request_id": timer.context.get(request_id),
            "dp_rank": timer.dp_rank,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": timer.cached_tokens,
            "completion_tokens": timer.num_tokens,
            "finish_reason": "error" if timer.error is not None else timer.finish_reason or "gone",
            "error": timer.error,
            "ttft_s": timer.ttft_s,
            "e2e_s": timer.elapsed_s,
        }
        try:
            os.write(self._file, json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.error("the request log %s cannot be written: %s", self._path, error)
            self._is_failing = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
