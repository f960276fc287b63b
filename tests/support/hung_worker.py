"""A worker process that hangs, and exits when asked for its stack."""

import os
import signal
import time
from pathlib import Path

from tapscope.engine.distributed.heartbeat import Activity, Heartbeat, heartbeat_path
from tapscope.engine.distributed.watchdog import _STACK_SIGNAL, stack_path


def hung_worker_main(number: int, folder: Path) -> None:
    """Entry point of worker ``number`` that shares ``folder`` with its watchdog."""
    signal.signal(_STACK_SIGNAL, lambda *_: os._exit(3))
    stack_path(folder, number).touch()
    Heartbeat(heartbeat_path(folder, number)).set_activity(Activity.WORKING)
    time.sleep(600)
