"""StepCounters: counts the values of every step and writes step lines, metrics and problems to the run."""

import functools
import logging
import threading
from typing import Any

from tapscope.core.observe import StepInfo
from tapscope.dumper.records.inflight_record import Sink
from tapscope.dumper.retention.retention_policy import RetentionPolicy
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.run_format import ledger
from tapscope.run_format.ledger import StepCounts, encode_line, event_line

_log = logging.getLogger("tapscope")
_MAX_REPORTS = 20


class StepCounters:
    """Counters and journal lines of the steps of one run."""

    def __init__(self, retention: RetentionPolicy) -> None:
        self._retention = retention
        self.sink: Sink = retention.sink
        """Destination of records and lines."""
        self.open_step: OpenStep | None = None
        """The open step, if any."""
        self.has_dropped = False
        """Whether the warning about dropped values was logged."""
        self.num_failed = 0
        """Number of failed values of all steps."""
        self.num_sent = 0
        """Number of records of all completed steps of this run."""
        self.lock = threading.Lock()
        """Guards the counters, because several threads may call the model concurrently."""
        self._num_dropped = 0
        self._late: list[OpenStep] = []
        self._num_reports = 0
        self._reported_dims: set[str] = set()

    @property
    def num_dropped(self) -> int:
        """Number of dropped values of all steps; values of held steps count once the steps are released.

        Includes values in flight when the recorder died, some of which it may have written.
        """
        return self._num_dropped + self._retention.num_dropped

    # ---- steps

    def announce(self, step: OpenStep) -> None:
        """Write the begin line of ``step``, once, before the first record of the step."""
        if not step.announced:
            step.announced = True
            compose = functools.partial(ledger.encoded_begin_line, epoch=step.epoch, skipped=step.skipped)
            self.sink.append(step.line(compose))
            if step.ended:  # no value arrived while the step was open
                self._put_line(ledger.end_line(step.info.step, step.counts))

    def end(self, step: OpenStep, metrics: dict[str, Any]) -> None:
        """End ``step``: write its counts and metrics."""
        self.announce(step)
        with self.lock:
            step.ended = True
        self._sum_up(step, step.counts)
        queued = self._retention.queue_bytes
        own = step.own_metrics() | ({} if queued is None else {"queue_bytes": queued})
        values = {name: float(value) for name, value in (own | metrics).items()}
        counts_rows = "num_tokens" not in metrics and (step.late_rows is not None or bool(step.info.rows))
        late_rows = step.late_rows if counts_rows or step.num_sketches_ahead else None
        end = ledger.end_line(step.info.step, step.counts)
        # A partial, not a closure: a closure creates more objects for the garbage collector to traverse.
        compose = functools.partial(_end_lines, step, values, end, counts_rows)
        self.sink.append(DeferredLine(step.info, late_rows, compose))

    def flush_late(self) -> None:
        """Write the counts of values that arrived after the end of their step."""
        with self.lock:
            late, self._late = self._late, []
        for step in late:
            counts, step.late = step.late, StepCounts()
            self._sum_up(step, counts)
            self._put_line(ledger.late_line(step.info.step, counts))

    def metric(self, step: int, name: str, value: float) -> None:
        """Write a metric of the step number ``step``; a value that is not finite becomes null."""
        self.sink.append(ledger.metric_line(step, name, value))

    # ---- values

    def mark_late(self, step: OpenStep) -> None:
        """Note that a value arrived after the end of ``step``."""
        with self.lock:
            if step not in self._late:
                self._late.append(step)

    def count(self, step: OpenStep, *, dropped: int = 0, failed: int = 0, left_out: int = 0) -> None:
        """Count values of ``step`` that are not recorded."""
        with self.lock:
            step.current_counts.left_out += left_out
            step.current_counts.dropped += dropped
            step.current_counts.failed += failed

    def count_sketches_ahead(self, step: OpenStep, number: int) -> None:
        """Count sketches of preliminary rows of ``step``, which are left out if the rows turn out to be different."""
        with self.lock:
            step.num_sketches_ahead += number

    def fail(self, step: OpenStep, where: str, error: Exception, *, number: int = 1) -> None:
        """Count ``number`` values of ``step`` as failed, and report the reason."""
        if step.ended:
            self.mark_late(step)
        self.count(step, failed=number)
        self.report(where, str(error) or type(error).__name__, step)

    def count_lost_copy(self) -> None:
        """Count a value that did not arrive from its device; the sender reports the reason in the run."""
        with self.lock:
            self.num_failed += 1

    def report(self, where: str, reason: str, step: OpenStep | None = None, *, kind: str = "failed") -> None:
        """Write a problem as an event of the run; only the first 20 reports are written."""
        step = step or self.open_step
        self._num_reports += 1
        if self._num_reports <= _MAX_REPORTS:
            number = step.info.step if step else None
            self._put_line(event_line(kind, where=where, reason=reason, step=number))

    def report_dims(self, where: str, reason: str) -> None:
        """Report a problem with dims, once per reason, because the same reason usually applies to many sites."""
        if reason not in self._reported_dims:
            self._reported_dims.add(reason)
            self.report(where, f"left out, here and where the same holds: {reason}", kind="dims")

    def _sum_up(self, step: OpenStep, counts: StepCounts) -> None:
        """Add the counts of a step to the totals; warn about the first drop, and write an event per step with drops."""
        counts.seen = counts.sent + counts.dropped + counts.failed
        if counts.dropped:
            if not self.has_dropped:
                self.has_dropped = True
                _log.warning("tapscope drops values from step %d on: %s", step.info.step, self._retention.drop_reason)
            self._put_line(event_line("dropped", step=step.info.step, num_values=counts.dropped))
        if not self._retention.is_holding:
            self._num_dropped += counts.dropped
        self.num_failed += counts.failed
        self.num_sent += counts.sent

    def _put_line(self, line: dict[str, Any]) -> None:
        self.sink.append(encode_line(line))


def _end_lines(
    step: OpenStep, values: dict[str, float], end: dict[str, Any], counts_rows: bool, info: StepInfo
) -> bytes:
    """Format the metric lines of a step whose rows are final, followed by its end line."""
    complete = values | {"num_tokens": info.num_rows} if counts_rows else values
    if step.num_sketches_ahead:
        complete = complete | {"num_sketches_left_out": step.num_sketches_ahead * step.has_other_rows}
    lines = [ledger.metric_line(info.step, name, value) for name, value in complete.items()]
    return b"\n".join([*lines, encode_line(end)])
