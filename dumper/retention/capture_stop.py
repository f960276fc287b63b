"""CaptureStop: stops the capture of one rank before the end of its run."""

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from tapscope.core.formatting import size
from tapscope.core.wire import Message
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.steps.open_step import OpenStep

_log = logging.getLogger("tapscope")
_TRIGGERS = "triggers"


class Budget:
    """Counts of written records, bytes and steps, with their limits.

    The record that reaches or exceeds a limit exhausts the budget, and is still written.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        """Payload bytes; shared payloads count once."""
        self.num_records = 0
        self.num_steps = 0
        """Number of steps with at least one record."""
        self._limits: dict[str, int] = {}
        self._lock = threading.Lock()

    def limit(self, config: DumperConfig) -> None:
        """Set the limits of ``config``; the counts are kept."""
        limits = {"max_bytes": config.max_bytes, "max_records": config.max_records, "max_steps": config.max_steps}
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}

    def restart(self) -> None:
        """Reset the counts for a new run; the limits are kept."""
        with self._lock:
            self.nbytes = self.num_records = self.num_steps = 0

    @property
    def is_limited(self) -> bool:
        """Whether any limit is set."""
        return bool(self._limits)

    def charge(self, *, num_records: int = 0, nbytes: int = 0, num_steps: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.num_records += num_records
            self.nbytes += nbytes
            self.num_steps += num_steps

    def reached(self) -> tuple[str, int] | None:
        """Return the first exhausted limit as (setting, value); None if no limit is exhausted."""
        used = {"max_bytes": self.nbytes, "max_records": self.num_records, "max_steps": self.num_steps}
        return next(((name, limit) for name, limit in self._limits.items() if used[name] >= limit), None)


class StopReason(NamedTuple):
    """The reason why capture is off until the next configuration."""

    setting: str
    """The setting whose limit was reached, or ``triggers``."""
    text: str


class CaptureStop:
    """Stops capture when a budget is exhausted, a trigger with the action ``stop`` fires, or disk space runs low.

    Any thread may stop capture. The forward's thread reads :attr:`stopped` between steps, and ``halted`` of the open
    step.
    """

    def __init__(self, queue: SendQueue, put_event: Callable[..., None]) -> None:
        self._queue = queue
        self._put_event = put_event
        self.stopped: StopReason | None = None
        """The reason why capture is off from the next step on; None while capturing."""
        self.min_free_bytes = 0
        """Free disk space in bytes below which capture stops; 0 disables the check."""
        self._budget = Budget()
        self._step: OpenStep | None = None  # the most recently begun step
        self._lock = threading.RLock()

    @property
    def is_limited(self) -> bool:
        """Whether any budget is set, so that records must be charged."""
        return self._budget.is_limited

    @property
    def forbids_release(self) -> bool:
        """Whether steps held by the flight recorder may no longer be written: any stop except one by a trigger."""
        return self.stopped is not None and self.stopped.setting != _TRIGGERS

    @property
    def open_step(self) -> OpenStep | None:
        """The open step; None between steps."""
        step = self._step
        return step if step is not None and not step.ended else None

    def configure(self, config: DumperConfig) -> None:
        """Apply the limits of ``config``; stops capture if a budget is already exhausted."""
        self.min_free_bytes = config.min_free_bytes or 0
        self._budget.limit(config)
        self.charge(halt=False)

    def begin(self, step: OpenStep) -> None:
        """Note ``step`` as the open step."""
        self._step = step

    def resume(self) -> None:
        """Resume capture after a new configuration, which stops it again if a budget is still exhausted."""
        if self.stopped is not None:
            self.stopped = None
            self._notify_recorder()

    def restart(self) -> None:
        """Reset the budgets and resume capture for a new run."""
        self._budget.restart()
        self.resume()

    # ---- reasons

    def charge(self, *, num_records: int = 0, nbytes: int = 0, num_steps: int = 0, halt: bool) -> None:
        """Charge written records, bytes and steps to the budgets, and stop capture if one is exhausted.

        ``halt`` as for :meth:`_stop`.
        """
        self._budget.charge(num_records=num_records, nbytes=nbytes, num_steps=num_steps)
        if self.stopped is None and (reached := self._budget.reached()) is not None:
            name, value = reached
            shown = size(value) if name == "max_bytes" else value
            self._stop(StopReason(name, f"{name}={shown} is reached"), halt=halt, value=value)

    def stop_for_trigger(self, reason: str) -> None:
        """Stop capture from the next step on, because a trigger fired on this or another rank."""
        self._stop(StopReason(_TRIGGERS, reason), halt=False)

    def check_disk(self, free: int, floor: int) -> None:
        """Stop capture immediately if ``free``, the free disk space in bytes, is below ``floor``."""
        if free < floor:
            text = f"{size(free)} are free on the disk of the run, min_free_bytes is {size(floor)}"
            self._stop(StopReason("min_free_bytes", text), halt=True, value=floor)

    def _stop(self, stop: StopReason, *, halt: bool, value: int | None = None) -> None:
        """Stop capture: with ``halt`` immediately, otherwise from the next step on. ``value`` is the reached limit."""
        with self._lock:
            if self.stopped is not None:
                return
            self.stopped, step = stop, self._step
        if halt and (current := self.open_step) is not None:
            current.halted = True
        number = None if step is None else step.info.step
        if value is not None:
            self._put_event("budget", limit=stop.setting, value=value, step=number, reason=stop.text)
        else:
            self._put_event("stop", reason=stop.text, step=number)
        self._notify_recorder()
        when = "before the first step" if number is None else f"at step {number}"
        _log.warning("tapscope stops capturing %s: %s; configure again to resume", when, stop.text)

    def _notify_recorder(self) -> None:
        self._queue.append(Message("stopped", {"reason": self.stopped.text if self.stopped is not None else None}))
        self._queue.flush()
