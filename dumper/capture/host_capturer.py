"""HostCapturer: records dense tensors in host memory."""

from collections.abc import Callable

import torch

from tapscope.dumper.capture.record_queue import RecordQueue
from tapscope.dumper.capture.rule_evaluator import RuleEvaluator, context_of
from tapscope.dumper.records import sketcher
from tapscope.dumper.records.dedup_cache import DedupCache
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.sketcher import SKETCH_LAYOUT, Sketcher
from tapscope.dumper.records.snapshot import measure, snapshot
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.run_format.sketch import NBYTES, SketchIndex, record_member

Diverges = Callable[[SitePort, Firing, torch.Tensor, RecordLayout, bytes | None], bool]
"""(port, firing, tensor, layout, hash or None) -> whether the tensor diverges from a reference and is kept in full."""


class HostCapturer:
    """Records dense host tensors synchronously: statistics, hash and copy in a single pass over the data."""

    def __init__(
        self,
        records: RecordQueue,
        rules: RuleEvaluator,
        counters: StepCounters,
        dedup: DedupCache,
        sketcher: Sketcher,
    ) -> None:
        self._sketcher = sketcher
        self._records = records
        self._rules = rules
        self._counters = counters
        self._dedup = dedup

    def record(
        self,
        port: SitePort,
        firing: Firing,
        tensor: torch.Tensor,
        layout: RecordLayout,
        *,
        full: bool,
        sketch: bool,
        diverges: Diverges | None = None,
    ) -> None:
        """Queue a record with the statistics of ``tensor``.

        With ``full``, or if a trigger or ``diverges`` asks for it, the record includes the bytes; with ``sketch``, the
        sketch.
        """
        dedup, sink = self._dedup, self._counters.sink
        taken = snapshot(tensor, layout, dedup, sink) if full else measure(tensor, layout, dedup)
        if diverges is not None and diverges(port, firing, tensor, layout, None if taken is None else taken[1]):
            if not full and '"cap":' not in layout.members:
                taken, full = snapshot(tensor, layout, dedup, sink), True
            sketch = sketch and not full
        if port.decision.triggers is not None:
            stats = (taken or measure(tensor, layout, dedup))[0]
            wants_full = self._rules.run_triggers(port, firing, layout, stats, context_of(tensor, firing))
            if wants_full and not full:
                taken = snapshot(tensor, layout, dedup, sink)
                sketch = False
        if sketch and (index := self._sketcher.index(port, firing.step, layout)) is not None:
            assert taken is not None
            self._record_sketch(port, firing, tensor, layout, index, taken[0])
            return
        self._records.put_snapshot(port, firing, layout, taken)

    def _record_sketch(
        self,
        port: SitePort,
        firing: Firing,
        tensor: torch.Tensor,
        layout: RecordLayout,
        index: SketchIndex,
        stats: bytes,
    ) -> None:
        counters = sketcher.take(tensor, layout, index)
        slot = self._counters.sink.reserve(NBYTES)
        if slot is None:
            self._counters.count(firing.step, dropped=1)
            return
        sketcher.write(counters, slot)
        content = stats + record_member(index.by_rows, counters)
        record = self._records.new_record(port, firing, layout, content, slot)
        record.stored = SKETCH_LAYOUT
        self._records.put(record)

    def watch(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout) -> None:
        """Evaluate triggers on a tensor that no rule keeps; record it in full if a trigger asks for it."""
        stats = measure(tensor, layout, self._dedup)[0]
        if self._rules.run_triggers(port, firing, layout, stats, context_of(tensor, firing)):
            if not port.announced:
                self._records.announce(port)
            taken = snapshot(tensor, layout, self._dedup, self._counters.sink)
            self._records.put_snapshot(port, firing, layout, taken)
