"""How idle OpenMP threads wait in tapscope's own processes.

By default they spin. Where processes share the cores, spinning threads then delay working ones and a step takes ten
times as long. OpenMP reads the setting once, when torch is loaded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_POLICY = "OMP_WAIT_POLICY"


def sleep_when_idle() -> None:
    """Let idle threads of this process sleep unless OMP_WAIT_POLICY is set; call it before torch is loaded."""
    os.environ.setdefault(_POLICY, "passive")


@contextmanager
def children_sleep_when_idle() -> Iterator[None]:
    """The same for processes started within the ``with``, not for this one."""
    if _POLICY in os.environ:
        yield
        return
    sleep_when_idle()
    try:
        yield
    finally:
        os.environ.pop(_POLICY, None)
