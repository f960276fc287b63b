"""Decider: what the rules and the triggers of a site say of one value."""

from collections.abc import Callable
from typing import Any

import torch

from tapscope.dumper.records import snapshot
from tapscope.dumper.records.dedup_cache import DedupCache
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.rule_context import rule_context
from tapscope.dumper.records.site_port import RecordLayout, SitePort
from tapscope.dumper.records.snapshot import TensorSnapshot
from tapscope.dumper.retention.retention_policy import RetentionPolicy
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.dumper.selection.selection import CaptureSpec, RuleContext


class RuleEvaluator:
    """Asks them, and says of each site once what is wrong with its conditions."""

    def __init__(self, retention: RetentionPolicy, counters: StepCounters, dedup: DedupCache) -> None:
        self._retention = retention
        self._counters = counters
        self._dedup = dedup

    def decide(self, port: SitePort, leaf: Any, firing: Firing) -> CaptureSpec:
        """What is kept of this value, where only its firing tells."""
        spec = port.decision.decide(rule_context(leaf, firing))
        if port.decision.problem is not None and not port.has_reported:
            port.has_reported = True
            self._counters.report(port.site, port.decision.problem)
        return spec

    def run_triggers(
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, taken: TensorSnapshot | None
    ) -> bool:
        """Ask the triggers of the site; whether the step, and what was only measured here, is to be kept in full."""
        text = (taken or snapshot.measure(tensor, layout, self._dedup))[0]
        return self.run_triggers_on(port, firing, layout, text, lambda: rule_context(tensor, firing))

    def run_triggers_on(
        self, port: SitePort, firing: Firing, layout: RecordLayout, text: bytes, context: Callable[[], RuleContext]
    ) -> bool:
        """The same of a value whose statistics are told by ``text``, members of its line."""
        triggers = port.decision.triggers
        assert triggers is not None
        fired = triggers.fired(text, context)
        if triggers.problem is not None and not port.has_reported:
            port.has_reported = True
            self._counters.report(port.site, triggers.problem, firing.step)
        capped = '"cap":' in layout.members
        return bool(fired) and self._retention.on_triggers(fired, port.site, firing.step) and not capped
