"""TriggerCommands: runs the commands of triggers outside the model's threads, for a limited time."""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

_log = logging.getLogger("tapscope")
TIME_LIMIT_S = 60.0
"""A command that takes longer is killed, with every process that it started."""
MAX_COMMANDS = 20
"""Maximum number of commands that one rank starts in a run."""


class TriggerCommands:
    """Starts commands in their own threads, so that nothing waits for them; reports how each ended."""

    def __init__(self, say: Callable[..., None], *, time_limit_s: float = TIME_LIMIT_S) -> None:
        """``say(**fields)`` is called for every command: ``argv`` and ``exit`` or ``problem``."""
        self._put_event = say
        self._time_limit_s = time_limit_s
        self.num_started = 0
        self.num_refused = 0
        """Commands beyond MAX_COMMANDS, which were not started."""

    def start(self, argv: Sequence[str]) -> None:
        """Run ``argv`` without a shell, with standard streams closed."""
        if self.num_started >= MAX_COMMANDS:
            self.num_refused += 1
            return
        self.num_started += 1
        threading.Thread(target=self._run, args=(list(argv),), name="tapscope-command", daemon=True).start()

    def _run(self, argv: list[str]) -> None:
        try:
            self._put_event(argv=argv, **self._outcome(argv))
        except Exception as error:  # noqa: BLE001 - a thread's exception would be lost
            _log.warning("tapscope: the command %s: %s", argv[0], error)

    def _outcome(self, argv: list[str]) -> dict[str, int | str]:
        null = subprocess.DEVNULL
        try:
            process = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)
        except (OSError, ValueError) as error:
            _log.warning("tapscope: the command %s was not started: %s", argv[0], error)
            return {"problem": f"not started: {error}"}
        try:
            return {"exit": process.wait(self._time_limit_s)}
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _log.warning("tapscope: the command %s was ended after %g s", argv[0], self._time_limit_s)
            return {"problem": f"ended after {self._time_limit_s:g} s"}
