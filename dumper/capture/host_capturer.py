"""HostCapturer: measures and copies a dense tensor in host memory, now."""

import torch

from tapscope.dumper.capture.record_queue import RecordQueue
from tapscope.dumper.capture.rule_evaluator import RuleEvaluator, context_of
from tapscope.dumper.records.dedup_cache import DedupCache
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.snapshot import measure, snapshot
from tapscope.dumper.retention.step_counters import StepCounters


class HostCapturer:
    """Reads the tensor once: statistics, hash and copy in one pass."""

    def __init__(self, records: RecordQueue, rules: RuleEvaluator, counters: StepCounters, dedup: DedupCache) -> None:
        self._records = records
        self._rules = rules
        self._counters = counters
        self._dedup = dedup

    def record(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, *, full: bool) -> None:
        """Queue a record with the statistics, and with ``full`` (or when a trigger asks for it) the bytes."""
        dedup, sink = self._dedup, self._counters.sink
        found = snapshot(tensor, layout, dedup, sink) if full else measure(tensor, layout, dedup)
        if port.decision.triggers is not None:
            stats = (found or measure(tensor, layout, dedup))[0]
            wants_full = self._rules.run_triggers(port, firing, layout, stats, context_of(tensor, firing))
            if wants_full and not full:
                found = snapshot(tensor, layout, dedup, sink)
        self._records.put_snapshot(port, firing, layout, found)

    def watch(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout) -> None:
        """The rules keep nothing: record the tensor in full if a trigger asks for it."""
        stats = measure(tensor, layout, self._dedup)[0]
        if self._rules.run_triggers(port, firing, layout, stats, context_of(tensor, firing)):
            if not port.announced:
                self._records.announce(port)
            found = snapshot(tensor, layout, self._dedup, self._counters.sink)
            self._records.put_snapshot(port, firing, layout, found)
