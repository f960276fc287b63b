"""RetentionPolicy: decides whether selected values reach the disk, by flight recorder, triggers and capture stop."""

import logging
import sys
from pathlib import Path
from typing import Any

from msgspec import structs

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import finite_or_none
from tapscope.core.wire import Message
from tapscope.dumper.config import DumperConfig, OnDivergence
from tapscope.dumper.job import exit_hooks
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.inflight_record import InflightRecord, Sink
from tapscope.dumper.reference.live_divergence import LiveDivergence
from tapscope.dumper.retention.capture_stop import CaptureStop
from tapscope.dumper.retention.crash_report import CrashReport, active_error
from tapscope.dumper.retention.flight_recorder import FlightRecorder, ReleaseResult
from tapscope.dumper.retention.trigger_actions import TriggerActions, TriggerOutcome
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.run_format.ledger import encode_line, event_line

_log = logging.getLogger("tapscope")
_MAX_DIVERGENCES = 100
"""Maximum number of divergence events written; all divergences are counted."""


class RetentionPolicy:
    """Holds or sends the captured values of one rank, and stops capture when necessary.

    Called from the forward's thread, the sender's thread (requests of other processes), and the thread that ends the
    process.
    """

    def __init__(self, queue: SendQueue, *, rank: int = 0, run: Path = Path()) -> None:
        self._queue = queue
        self.sink: Sink = queue
        """Destination of records and step lines."""
        self.trigger_actions = TriggerActions(self._put_event, rank=rank, run=run)
        self.capture_stop = CaptureStop(queue, self._put_event)
        self._crash_report = CrashReport(self._put_event)
        self._last_step: int | None = None
        self.is_limited = False
        """Whether :meth:`charge` must be called for every record sent."""
        self._num_dropped = 0
        self._flight: FlightRecorder | None = None
        self._full_window = (0, -1)  # (first, last) step to keep in full because of another rank's trigger
        self._last_alarm = (-1, False, False)  # (step, keep, stop) of the last alarm sent to the other ranks
        self._requested: str | None = None
        self._on_divergence: OnDivergence = "keep"
        self._num_divergences = 0

    # ---- configuration

    def configure(self, config: DumperConfig) -> None:
        """Apply ``config``: budgets, flight recorder and the action on divergence."""
        self._on_divergence = config.on_divergence
        self.capture_stop.configure(config)
        self.is_limited = self.capture_stop.is_limited
        if config.flight_recorder_steps and self._flight is not None:
            self._flight.resize(config.flight_recorder_steps, config.flight_recorder_bytes)
        elif config.flight_recorder_steps and isinstance(self._queue, SendQueue):
            self.sink = self._flight = FlightRecorder(
                self._queue, config.flight_recorder_steps, config.flight_recorder_bytes
            )
            exit_hooks.install(self, config.flight_recorder_signal)
        elif self._flight is not None:
            self._put_unreleased()
            exit_hooks.uninstall(self)
            self.sink, self._flight = self._queue, None
        if self._flight is not None:
            self._flight.pass_through = config.capture_steps is not None

    def restart(self, run: Path) -> None:
        """Start a new run: reset the budgets and discard held steps of the old run."""
        if self._flight is not None and (discarded := self._flight.take_discarded()).number:
            _log.info("tapscope: the flight recorder discarded %d steps of the run before %s", discarded.number, run)
        self.capture_stop.restart()
        self.trigger_actions = TriggerActions(self._put_event, rank=self.trigger_actions.rank, run=run)

    # ---- steps, in the forward's thread

    def begin(self, step: OpenStep) -> None:
        """Begin ``step``; it is kept in full if another rank's trigger asked for that."""
        number = step.info.step
        step.in_full = self._full_window[0] <= number <= self._full_window[1]
        self.capture_stop.begin(step)
        if self._flight is not None:
            self._flight.begin(number)

    def end(self, step: OpenStep) -> None:
        """End ``step``, whose lines are written; an aborted step is released together with the steps before it."""
        self._last_step = step.info.step
        if step.counts.aborted:
            self._crash_report.write(sys.exception(), step.info.step)
        if self._flight is not None and step.counts.aborted:
            self._try_release(None, f"step {step.info.step} was ended by {step.counts.aborted}")
        if self.is_limited and step.counts.sent and not self.is_holding:
            self.capture_stop.charge(num_steps=1, halt=False)

    @property
    def is_holding(self) -> bool:
        """Whether the flight recorder holds new records in memory."""
        return self._flight is not None and self._flight.is_holding

    @property
    def num_dropped(self) -> int:
        """Number of values counted as sent that were lost: dropped from released steps, or in flight when the recorder
        died."""
        return self._num_dropped + self._queue.num_abandoned

    @property
    def queue_bytes(self) -> int | None:
        """Bytes in flight to the recorder; None if values are kept in memory."""
        return self._queue.in_flight_bytes if isinstance(self._queue, SendQueue) else None

    @property
    def drop_reason(self) -> str:
        """The reason why values are being dropped."""
        if self.is_holding and self._flight is not None:
            return f"a step is larger than flight_recorder_bytes={self._flight.limit}"
        return "the pipeline is full, or the recorder has ended"

    def charge(self, record: InflightRecord) -> None:
        """Charge a record to the budgets, unless the flight recorder holds it."""
        if not self.is_holding:
            self.capture_stop.charge(num_records=1, nbytes=record.nbytes, halt=True)

    def on_triggers(self, fired: list[Any], site: str, step: OpenStep) -> bool:
        """Run the actions of triggers that fired in ``step``; returns whether to keep the rest of the step in full."""
        return self._act(self.trigger_actions.fire(fired, site, step), step)

    def on_divergence(self, divergence: LiveDivergence, step: OpenStep) -> bool:
        """Report a divergence from the reference run in ``step`` and apply the setting ``on_divergence``.

        Returns whether to keep the rest of the step in full.
        """
        self._num_divergences += 1
        if self._num_divergences <= _MAX_DIVERGENCES:
            self._put_event("divergence", **structs.asdict(divergence))
        self._queue.append(Message("divergence", {"found": finite_or_none(structs.asdict(divergence))}))
        self._queue.flush()
        keep, stop = self._on_divergence != "report", self._on_divergence == "stop"
        reason = f"divergence from the reference at {divergence.site}, step {divergence.step}, rank {divergence.rank}"
        return self._act(TriggerOutcome(keep, stop, reason), step)

    def _act(self, outcome: TriggerOutcome, step: OpenStep) -> bool:
        """Apply a trigger outcome to ``step`` and notify the other ranks.

        Returns whether to keep the rest of the step in full.
        """
        first = last = step.info.step
        if self._flight is not None:
            first = min(self._flight.window(self._flight.num_steps)[0], last)
        alarm = (last, outcome.keep, outcome.stop)
        if (outcome.keep or outcome.stop) and alarm != self._last_alarm:
            self._last_alarm = alarm
            fields = {"keep": outcome.keep, "stop": outcome.stop, "reason": outcome.reason}
            # Send the alarm before our own steps, which may be large: the other ranks must still hold theirs.
            self._queue.append(Message("trigger", {"first": first, "last": last, **fields}))
            self._queue.flush()
        if outcome.keep:
            step.in_full = True
            self._try_release((first, last), outcome.reason)
        if outcome.stop:
            self.capture_stop.stop_for_trigger(outcome.reason)
        return outcome.keep

    # ---- requests, from any thread

    def release(self, past: int | None, reason: str) -> ReleaseResult:
        """Send the newest ``past`` steps (None: all held steps), and the rest of the open step as it arrives.

        Raises ConfigError if the flight recorder is off, or a budget or low disk space has stopped capture.
        """
        if self._flight is None:
            raise ConfigError("no flight recorder is on; configure flight_recorder_steps first")
        if self.capture_stop.stopped is not None and self.capture_stop.forbids_release:
            raise ConfigError(f"nothing is released: {self.capture_stop.stopped.text}")
        return self._release(self._flight, self._flight.window(past or self._flight.num_steps), reason)

    def request_release(self, reason: str) -> None:
        """Request a release by the sender's thread, for signal handlers, which may run while any lock is held."""
        self._requested = reason
        self._queue.nudge()

    def flush_at_exit(self, reason: str, timeout_s: float) -> None:
        """Release all held steps before the process exits, and wait up to ``timeout_s`` until they are written."""
        if self._try_release(None, reason):
            self._queue.drained(timeout_s)

    def tick(self) -> None:
        """Perform a release requested by :meth:`request_release`; the sender's thread calls it at least every 0.5 s."""
        if self._requested is not None:
            reason, self._requested = self._requested, None
            self._try_release(None, reason)

    def handle_message(self, message: Message) -> bool:
        """Handle a ``trigger`` (of another rank) or ``disk_low`` message of the recorder; False for other messages."""
        if message.kind == "trigger":
            first, last = int(message["first"]), int(message["last"])
            if message["keep"]:
                self._full_window = (first, last)
                if (step := self.capture_stop.open_step) is not None and first <= step.info.step <= last:
                    step.in_full = True
                self._try_release((first, last), str(message["reason"]))
            if message["stop"]:
                self.capture_stop.stop_for_trigger(str(message["reason"]))
            return True
        if message.kind == "disk_low":  # only this process knows its own setting, so check again
            self.capture_stop.check_disk(int(message["free"]), self.capture_stop.min_free_bytes)
            return True
        return False

    def close(self, interrupted: str | None = None) -> None:
        """End the run: write summaries of triggers and of held steps that were never released.

        If an exception ended the run, ``interrupted`` is its name, and held steps are released.
        """
        self.tick()
        if interrupted is not None:
            self._crash_report.write(active_error(), self._last_step)
            self._try_release(None, f"the run was ended by {interrupted}")
        self.trigger_actions.write_summary()
        self._put_unreleased()
        exit_hooks.uninstall(self)

    # ---- inside

    def _try_release(self, window: tuple[int, int] | None, reason: str) -> bool:
        """Release the steps of ``window`` (None: all), if permitted; returns whether any step was released."""
        flight = self._flight
        if flight is None or self.capture_stop.forbids_release:
            return False
        return bool(self._release(flight, window or flight.window(flight.num_steps), reason).steps)

    def _release(self, flight: FlightRecorder, window: tuple[int, int], reason: str) -> ReleaseResult:
        released = flight.release(*window, reason)
        self._num_dropped += released.num_dropped
        if released.steps:
            _log.warning("tapscope: the flight recorder wrote %s: %s", _span(released.steps), reason)
        if self.is_limited:
            step = self.capture_stop.open_step
            num_steps = len(released.steps) - (step is not None and step.info.step in released.steps)
            counts = {"num_records": released.num_values, "nbytes": released.nbytes, "num_steps": num_steps}
            self.capture_stop.charge(**counts, halt=True)
        return released

    def _put_unreleased(self) -> None:
        if self._flight is not None and (discarded := self._flight.take_discarded()).number:
            fields = {"num_steps": discarded.number, "num_values": discarded.num_values, "nbytes": discarded.nbytes}
            self._put_event("unreleased", **fields)

    def _put_event(self, kind: str, **fields: Any) -> None:
        self._queue.append(encode_line(event_line(kind, **finite_or_none(fields))))


def _span(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
