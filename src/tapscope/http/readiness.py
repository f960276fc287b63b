"""Readiness: wait until a server responds, and detect when its process has died."""

import http.client
import signal
import time
import urllib.error
import urllib.request
from typing import Any

from tapscope.core.errors import UnreachableError

_PAUSE_S = 0.05
_REQUEST_TIMEOUT_S = 2.0
_NO_ANSWER = "no answer"


def wait_for_ready(url: str, process: Any = None, timeout_s: float = 60.0) -> None:
    """Wait until GET ``url`` returns a 2xx status.

    ``url`` may be ``HOST:PORT``, which means ``http://HOST:PORT/health``, or ``HOST:PORT/PATH``. ``process`` is the
    server process, a ``subprocess.Popen`` or a ``multiprocessing.Process``. If the process ends, the wait fails
    immediately, even if another server responds at ``url``.

    Raises UnreachableError with the exit code of the ended process, or after ``timeout_s`` with the last response.
    """
    if "://" not in url:
        url = f"http://{url}" if "/" in url else f"http://{url}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline, last = time.monotonic() + timeout_s, _NO_ANSWER
    while True:
        if (code := _exit_code(process)) is not None:
            raise UnreachableError(f"{url}: the server process {_exit_description(code)} before it was ready")
        left = deadline - time.monotonic()
        if left <= 0:
            raise UnreachableError(f"{url} is not ready after {timeout_s:g} s: {last}")
        try:
            with opener.open(url, timeout=min(_REQUEST_TIMEOUT_S, left)):
                if _exit_code(process) is None:
                    return
        except urllib.error.HTTPError as error:
            last = f"status {error.code}"
            error.close()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            is_cut_short = isinstance(reason, TimeoutError) and left < _REQUEST_TIMEOUT_S
            if not is_cut_short or last == _NO_ANSWER:  # the server may still be working on its usual response
                last = str(reason) or type(error).__name__
        time.sleep(_PAUSE_S)


def _exit_code(process: Any) -> int | None:
    if process is None:
        return None
    code: int | None = process.poll() if hasattr(process, "poll") else process.exitcode
    return code


def _exit_description(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
