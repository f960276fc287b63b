"""SiteTriggers: the triggers of one site, evaluated on the statistics of each value."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tapscope.dumper.rules.trigger import STATISTICS, Trigger
from tapscope.dumper.selection.rule_context import RuleContext
from tapscope.run_format.stats import Stats

_STATS = b'"stats":'
_FINITE_TEXT = b'"nan":0,"posinf":0,"neginf":0,'
_NONFINITE = frozenset(("nan", "posinf", "neginf", "inf", "nonfinite"))
_FINITE_STATS = Stats(1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


class SiteTriggers:
    """The triggers that match one site."""

    __slots__ = ("_known", "_needs_moment", "_skip_finite", "num_problems", "problem", "triggers")

    def __init__(self, triggers: Sequence[Trigger], known: Mapping[str, Any]) -> None:
        """``known`` maps the names that the site and the rank determine to their values."""
        self.triggers = tuple(triggers)
        self._known = {name: value for name, value in known.items() if any(name in t.names for t in triggers)}
        self._needs_moment = any(name not in STATISTICS and name not in known for t in triggers for name in t.names)
        self.problem: str | None = None
        """Error of the first condition that failed to evaluate; such a condition counts as false."""
        self.num_problems = 0
        # Most triggers look for NaN and infinities, and most values have none: then a substring search suffices.
        only_nonfinite = all(t.names <= _NONFINITE for t in triggers)
        self._skip_finite = only_nonfinite and not self._fired(_FINITE_STATS, {})
        self.num_problems, self.problem = 0, None

    def fired(self, text: bytes, context: Callable[[], RuleContext]) -> list[tuple[Trigger, Stats]]:
        """Return the triggers that fire, each with the statistics; never raises.

        ``text`` ends with the member ``stats`` of a record line; ``context`` is called only if a condition needs it.
        """
        if self._skip_finite and _FINITE_TEXT in text:
            return []
        stats = Stats.from_json(json.loads(text[text.index(_STATS) + len(_STATS) :].decode()))
        values = self._known | _values(context()) if self._needs_moment else self._known
        return [(trigger, stats) for trigger in self._fired(stats, values)]

    def _fired(self, stats: Stats, values: Mapping[str, Any]) -> list[Trigger]:
        fired = []
        for trigger in self.triggers:
            try:
                if trigger.fires(stats, values):
                    fired.append(trigger)
            except Exception as error:  # noqa: BLE001 - the model must go on
                self.num_problems += 1
                self.problem = self.problem or f"trigger '{trigger}': {error}"
        return fired


def _values(context: RuleContext) -> dict[str, Any]:
    return context._asdict() | {"ndim": len(context.shape), "numel": math.prod(context.shape)}
