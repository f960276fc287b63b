"""RuleEvaluator: evaluates the rules and triggers of a site for one value."""

from collections.abc import Callable
from typing import Any

import torch

from tapscope.dumper.records.firing import Firing, rule_context
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.retention.retention_policy import RetentionPolicy
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.dumper.selection.selection import CaptureSpec, RuleContext


class RuleEvaluator:
    """Evaluates conditions, and reports the first evaluation error of each site."""

    def __init__(self, retention: RetentionPolicy, counters: StepCounters) -> None:
        self._retention = retention
        self._counters = counters

    def decide(self, port: SitePort, leaf: Any, firing: Firing) -> CaptureSpec:
        """Return the capture spec of a value whose rules depend on the firing."""
        spec = port.decision.decide(rule_context(leaf, firing))
        if port.decision.problem is not None and not port.has_reported:
            port.has_reported = True
            self._counters.report(port.site, port.decision.problem)
        return spec

    def run_triggers(
        self, port: SitePort, firing: Firing, layout: RecordLayout, stats: bytes, context: Callable[[], RuleContext]
    ) -> bool:
        """Run the triggers of the site; returns whether the value must be kept in full.

        ``stats`` are the statistics of the value, as members of its record line.
        """
        triggers = port.decision.triggers
        assert triggers is not None
        fired = triggers.fired(stats, context)
        if triggers.problem is not None and not port.has_reported:
            port.has_reported = True
            self._counters.report(port.site, triggers.problem, firing.step)
        is_capped = '"cap":' in layout.members
        return bool(fired) and self._retention.on_triggers(fired, port.site, firing.step) and not is_capped


def context_of(tensor: torch.Tensor, firing: Firing) -> Callable[[], RuleContext]:
    """Return a function that builds the rule context of a tensor, so that it is only built if a trigger needs it."""
    return lambda: rule_context(tensor, firing)
