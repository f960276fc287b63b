"""Collector: from a tap that fires, within a step, to records on their way. Nothing here may raise into the model."""

import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from tapscope import ledger
from tapscope.dumper import capture
from tapscope.dumper.batch import Pending
from tapscope.dumper.config import Selection
from tapscope.dumper.flatten import flatten, plain_value
from tapscope.dumper.pipeline import Pipeline
from tapscope.dumper.taps import Port, Tap, slots_as_ranges, usable_dims
from tapscope.ledger import StepCounts, event_line
from tapscope.observe import StepInfo
from tapscope.record import Key, Record

_log = logging.getLogger("tapscope")
_MAX_COMPLAINTS = 20


class Collector:
    """The open step of one rank and what was counted in it."""

    def __init__(self, pipeline: Pipeline, rank: int) -> None:
        self._pipeline = pipeline
        self._rank = rank
        self.selection = Selection.of_nothing()
        self.step: StepInfo | None = None
        """The open step."""
        self.counts = StepCounts()
        """Of the open step, or the last one."""
        self.num_outside = 0
        """Firings outside any step, not kept."""
        self.num_dropped = 0
        self.num_failed = 0
        """Of all steps."""
        self.rows_of_first_call = False
        """Whether the open step's rows were read off the model's arguments."""
        self._pid = os.getpid()
        self._announced_sites: set[str] = set()
        self._payloads: dict[tuple[str, int], int] = {}  # (hash, nbytes) -> number, of what this step has sent
        self._num_payloads = 0
        self._epoch = 0
        self._announced = False
        self._began = 0.0
        self._serial = 0
        self._seq = 0
        self._num_complaints = 0
        self._row_ranges: dict[str, tuple[tuple[int, int], ...]] = {}

    def begin(self, info: StepInfo, epoch: int) -> None:
        """Open a step."""
        self.step, self._epoch, self._announced, self.rows_of_first_call = info, epoch, False, False
        self._serial += 1
        self.counts = StepCounts()
        self._payloads.clear()
        self._row_ranges = {name: slots_as_ranges(slots) for name, slots in info.row_sets.items()}
        self._pipeline.at = info.step
        self._began = time.perf_counter()

    def may_describe(self) -> bool:
        """Whether nobody has told the open step's rows and they may still be told."""
        info = self.step
        told = info is None or info.grid or info.rows or info.token_ids or info.row_sets
        return not told and not self._announced

    def end(self, metrics: Mapping[str, float], aborted: str | None) -> None:
        """Close the open step: metrics and counts go out; ``aborted`` names the exception that ended it."""
        info, self.step = self.step, None
        if info is None:
            return
        self._announce(info)
        self.counts.aborted = aborted
        self._account(info)
        measured = {"latency_s": time.perf_counter() - self._began, "num_tokens": float(info.num_rows)}
        for name, value in (measured | dict(metrics)).items():
            self.metric(info.step, name, value)
        self._pipeline.put_line(ledger.end_line(info.step, self.counts))
        self._pipeline.kick()

    def metric(self, step: int, name: str, value: float) -> None:
        """Send a named number; one that is not finite goes as null."""
        number = float(value) if math.isfinite(value) else None
        self._pipeline.put_line({"type": "metric", "step": step, "name": name, "value": number})

    def restart(self) -> None:
        """A new run begins: records are numbered from 0 and sites announced again."""
        self._seq = 0
        self._announced_sites.clear()

    def _account(self, info: StepInfo) -> None:
        """Say at once when values begin to be lost, and in the run how many each step lost."""
        if self.counts.dropped:
            if not self.num_dropped:
                text = "tapscope drops values from step %d on: the pipeline is full or the recorder gone"
                _log.warning(text, info.step)
            self._pipeline.put_line(event_line("dropped", step=info.step, num_values=self.counts.dropped))
        self.num_dropped += self.counts.dropped
        self.num_failed += self.counts.failed

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """A tap fired with ``(args, kwargs)`` (kind ``in``) or an output (kind ``out``)."""
        if os.getpid() != self._pid:
            return  # a forked child: its pipeline has no thread, and the rank is its parent's
        try:
            if self.step is None:
                self.num_outside += 1
                return
            self._announce(self.step)
            tap.fired = True
            occurrence = tap.occurrence(self._serial, kind)
            for path, leaf in flatten(tap.named_inputs(*value) if kind == "in" else value):
                port = tap.port(kind, path, self.selection)
                if port.keep != "off":
                    self._take(tap, port, leaf, Key(port.site, self.step.step, self._rank, occurrence))
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.counts.seen += 1
            self.counts.failed += 1
            self.complain(tap.path, f"{type(error).__name__}: {error}")

    def complain(self, where: str, reason: str) -> None:
        """Say in the run that something could not be captured; the first ones only, all are counted."""
        self._num_complaints += 1
        if self._num_complaints <= _MAX_COMPLAINTS:
            step = self.step.step if self.step else None
            self._pipeline.put_line(event_line("failed", where=where, reason=reason, step=step))

    def _announce(self, info: StepInfo) -> None:
        if not self._announced:
            self._announced = True
            self._pipeline.put_line(ledger.begin_line(info, self._epoch))

    def _take(self, tap: Tap, port: Port, leaf: Any, key: Key) -> None:
        self.counts.seen += 1
        try:
            pending = self._pending(port, leaf, key)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.counts.failed += 1
            self.complain(port.site, str(error) or type(error).__name__)
            return
        port.checked = True
        if port.site not in self._announced_sites:
            self._announced_sites.add(port.site)
            line = {"type": "site", "site": port.site, "class": tap.module_class, "params": tap.params}
            self._pipeline.put_line(line)
        if self._pipeline.put(pending):
            self.counts.sent += 1
            if pending.buffer is not None and pending.payload is not None and pending.record.hash is not None:
                self._payloads[pending.record.hash, pending.buffer.numel()] = pending.payload
        else:
            self.counts.dropped += 1
        self._seq += 1

    def _pending(self, port: Port, leaf: Any, key: Key) -> Pending:
        if not isinstance(leaf, torch.Tensor):
            return Pending(Record(key, self._seq, None, (), value=plain_value(leaf)))
        tensor = capture.local_tensor(leaf)
        shape = tuple(tensor.shape)
        if not port.checked:
            port.dims, problem = usable_dims(port.dims, shape)
            if problem:
                self.complain(port.site, problem)
        rows = self._row_ranges.get(port.row_set) if port.row_set else None
        dtype = capture.dtype_name(tensor)
        taken = (
            capture.take(tensor, self._pipeline.pool, self._payloads)
            if port.keep == "full"
            else capture.measure(tensor)
        )
        rec = Record(key, self._seq, dtype, shape, port.dims, rows, taken.stats, taken.hash)
        if port.keep != "full":
            return Pending(rec)
        same = (taken.hash, tensor.numel() * tensor.element_size())
        if taken.buffer is None:
            return Pending(rec, None, self._payloads[same])
        self._num_payloads += 1
        return Pending(rec, taken.buffer, self._num_payloads)
