"""StartupTimer: time and memory of each startup stage of an engine, for logs and metrics."""

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)


class StartupTimer:
    """Seconds and memory growth of each startup stage, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.grown_bytes: dict[str, int] = {}
        """Growth of the process's resident memory by stage; empty if the system does not report it."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context manager: measure the ``with`` block as stage ``name``; repeated stages are summed."""
        began, before = time.perf_counter(), resident_bytes()
        yield
        seconds, after = time.perf_counter() - began, resident_bytes()
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if before is not None and after is not None:
            self.grown_bytes[name] = self.grown_bytes.get(name, 0) + after - before
        grown = "" if before is None or after is None else f", {(after - before) / 2**20:+.0f} MiB"
        _log.info("start-up: %s took %.2f s%s", name, seconds, grown)


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()
