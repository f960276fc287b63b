"""Wait policy of idle OpenMP threads in tapscope's own processes.

By default, idle threads spin. If processes share cores, spinning threads delay working ones, and a step takes ten times
as long. OpenMP reads the setting once, when torch is loaded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_POLICY = "OMP_WAIT_POLICY"


def sleep_when_idle() -> None:
    """Make idle OpenMP threads of this process sleep, unless OMP_WAIT_POLICY is set. Call before torch is loaded."""
    os.environ.setdefault(_POLICY, "passive")


@contextmanager
def children_sleep_when_idle() -> Iterator[None]:
    """Context manager: :func:`sleep_when_idle` for processes started inside, but not for this process."""
    if _POLICY in os.environ:
        yield
        return
    sleep_when_idle()
    try:
        yield
    finally:
        os.environ.pop(_POLICY, None)
