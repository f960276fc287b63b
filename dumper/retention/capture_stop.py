"""CaptureStop: ends the capture of one rank before its run ends."""

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
    """Counts what is written.

    A budget is exhausted by the record that reaches or exceeds it, which is still written.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        """Payload bytes; shared ones count once."""
        self.num_records = 0
        self.num_steps = 0
        """Steps with at least one record."""
        self._limits: dict[str, int] = {}
        self._lock = threading.Lock()

    def limit(self, config: DumperConfig) -> None:
        """Set other limits; counts are kept."""
        limits = {"max_bytes": config.max_bytes, "max_records": config.max_records, "max_steps": config.max_steps}
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}

    def restart(self) -> None:
        """A new run."""
        with self._lock:
            self.nbytes = self.num_records = self.num_steps = 0

    @property
    def is_limited(self) -> bool:
        """Whether any limit is set."""
        return bool(self._limits)

    def charge(self, *, num_records: int = 0, nbytes: int = 0, num_steps: int = 0) -> None:
        """Count what is written."""
        with self._lock:
            self.num_records += num_records
            self.nbytes += nbytes
            self.num_steps += num_steps

    def reached(self) -> tuple[str, int] | None:
        """The first exhausted limit, as setting and value; None when there is none."""
        used = {"max_bytes": self.nbytes, "max_records": self.num_records, "max_steps": self.num_steps}
        return next(((name, limit) for name, limit in self._limits.items() if used[name] >= limit), None)


class StopReason(NamedTuple):
    """Why capture is off until it is configured again."""

    setting: str
    """The setting whose limit was reached, or ``triggers``."""
    text: str


class CaptureStop:
    """Stops the capture at a budget, at a trigger with the action stop, and when disk space runs low.

    Any thread may stop it. The forward's thread reads :attr:`stopped` between steps, and ``halted`` of the open step.
    """

    def __init__(self, queue: SendQueue, put_event: Callable[..., None]) -> None:
        self._queue = queue
        self._put_event = put_event
        self.stopped: StopReason | None = None
        """Why nothing is captured from the next step on; None while capturing."""
        self.min_free_bytes = 0
        """Free disk space below which capture stops."""
        self._budget = Budget()
        self._step: OpenStep | None = None  # the last one that began
        self._lock = threading.RLock()

    @property
    def is_limited(self) -> bool:
        """Whether any budget is set, so that records must be charged."""
        return self._budget.is_limited

    @property
    def forbids_release(self) -> bool:
        """Whether nothing more may be written, including held steps."""
        return self.stopped is not None and self.stopped.setting != _TRIGGERS

    @property
    def open_step(self) -> OpenStep | None:
        """The step that the forward is in."""
        step = self._step
        return step if step is not None and not step.ended else None

    def configure(self, config: DumperConfig) -> None:
        """A configuration takes effect."""
        self.min_free_bytes = config.min_free_bytes or 0
        self._budget.limit(config)
        self.charge(halt=False)

    def begin(self, step: OpenStep) -> None:
        """A step begins."""
        self._step = step

    def resume(self) -> None:
        """The capture was configured again: resume, unless a budget is still exhausted."""
        if self.stopped is not None:
            self.stopped = None
            self._notify_recorder()

    def restart(self) -> None:
        """A new run begins: budgets are reset."""
        self._budget.restart()
        self.resume()

    # ---- reasons

    def charge(self, *, num_records: int = 0, nbytes: int = 0, num_steps: int = 0, halt: bool) -> None:
        """Count what is written, and stop when a budget is exhausted; ``halt`` as for :meth:`_stop`."""
        self._budget.charge(num_records=num_records, nbytes=nbytes, num_steps=num_steps)
        if self.stopped is None and (reached := self._budget.reached()) is not None:
            name, value = reached
            shown = size(value) if name == "max_bytes" else value
            self._stop(StopReason(name, f"{name}={shown} is reached"), halt=halt, value=value)

    def stop_for_trigger(self, reason: str) -> None:
        """A trigger on this or another rank stops the capture."""
        self._stop(StopReason(_TRIGGERS, reason), halt=False)

    def check_disk(self, free: int, floor: int) -> None:
        """Stop when free disk space is below ``floor`` bytes."""
        if free < floor:
            text = f"{size(free)} are free on the disk of the run, min_free_bytes is {size(floor)}"
            self._stop(StopReason("min_free_bytes", text), halt=True, value=floor)

    def _stop(self, stop: StopReason, *, halt: bool, value: int | None = None) -> None:
        """``halt``: from now on, else from the next step on."""
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
