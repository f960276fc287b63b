"""Collector: from a tap that fires, within a step, to records on their way. Nothing here may raise into the model."""

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
from tapscope.ledger import StepCounts
from tapscope.observe import StepInfo
from tapscope.record import Key, Record

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
        self.num_outside = 0
        """Firings outside any step, not kept."""
        self._epoch = 0
        self._announced = False
        self._began = 0.0
        self._serial = 0
        self._seq = 0
        self._num_complaints = 0
        self._row_ranges: dict[str, tuple[tuple[int, int], ...]] = {}

    def begin(self, info: StepInfo, epoch: int) -> None:
        """Open a step."""
        self.step, self._epoch, self._announced = info, epoch, False
        self._serial += 1
        self.counts = StepCounts()
        self._row_ranges = {name: slots_as_ranges(slots) for name, slots in info.row_sets.items()}
        self._pipeline.at = info.step
        self._began = time.perf_counter()

    @property
    def may_describe(self) -> bool:
        """Whether the open step's rows are unknown and may still be told."""
        return self.step is not None and not self.step.grid and not self._announced

    def end(self, metrics: Mapping[str, float]) -> None:
        """Close the open step: metrics and counts go out."""
        info, self.step = self.step, None
        if info is None:
            return
        self._announce(info)
        measured = {"latency_s": time.perf_counter() - self._began, "num_tokens": float(info.num_rows)}
        for name, value in (measured | dict(metrics)).items():
            self.metric(info.step, name, value)
        self._pipeline.put_line(ledger.end_line(info.step, self.counts))
        self._pipeline.kick()

    def metric(self, step: int, name: str, value: float) -> None:
        """Send a named number."""
        self._pipeline.put_line({"type": "metric", "step": step, "name": name, "value": float(value)})

    def restart(self) -> None:
        """A new run begins: records are numbered from 0 again."""
        self._seq = 0

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """A tap fired with ``(args, kwargs)`` (kind ``in``) or an output (kind ``out``)."""
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
            self.counts.failed += 1
            self.complain(tap.path, f"{type(error).__name__}: {error}")

    def complain(self, where: str, reason: str) -> None:
        """Say in the run that something could not be captured; the first ones only, all are counted."""
        self._num_complaints += 1
        if self._num_complaints <= _MAX_COMPLAINTS:
            step = self.step.step if self.step else None
            event = {"type": "event", "kind": "failed", "where": where, "reason": reason, "step": step}
            self._pipeline.put_line(event)

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
        if not port.announced:
            port.announced = True
            line = {"type": "site", "site": port.site, "class": tap.module_class, "params": tap.params}
            self._pipeline.put_line(line)
        if self._pipeline.put(pending):
            self.counts.sent += 1
        else:
            self.counts.dropped += 1
        self._seq += 1

    def _pending(self, port: Port, leaf: Any, key: Key) -> Pending:
        if not isinstance(leaf, torch.Tensor):
            return Pending(Record(key, self._seq, None, (), value=plain_value(leaf)), None, 0)
        tensor = capture.local_tensor(leaf)
        shape = tuple(tensor.shape)
        if not port.announced:
            port.dims, problem = usable_dims(port.dims, shape)
            if problem:
                self.complain(port.site, problem)
        rows = self._row_ranges.get(port.row_set) if port.row_set else None
        dtype = capture.dtype_name(tensor)
        if port.keep == "full":
            taken = capture.snapshot(tensor, self._pipeline.pool)
            return Pending(Record(key, self._seq, dtype, shape, port.dims, rows), taken, tensor.numel())
        stats, digest = capture.measure(tensor)
        return Pending(Record(key, self._seq, dtype, shape, port.dims, rows, stats, digest), None, 0)
