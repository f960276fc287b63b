"""How OpenMP's idle threads wait in processes that are tapscope's own.

By default they spin. Where other processes want the cores, threads that are wanted then stand behind threads that only
spin, and a step takes ten times as long. OpenMP reads the setting once, when torch is loaded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_POLICY = "OMP_WAIT_POLICY"


def wait_asleep() -> None:
    """Let idle threads of this process sleep, unless the user has set OMP_WAIT_POLICY; call it before torch loads."""
    os.environ.setdefault(_POLICY, "passive")


@contextmanager
def children_wait_asleep() -> Iterator[None]:
    """The same for the processes that are started meanwhile, not for this one."""
    if _POLICY in os.environ:
        yield
        return
    wait_asleep()
    try:
        yield
    finally:
        os.environ.pop(_POLICY, None)
