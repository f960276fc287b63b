"""Sentinel: the triggers of one site, asked with the statistics of every value that comes there."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tapscope.dumper.rules.trigger import STATISTICS, Trigger
from tapscope.dumper.selection.site_decision import Moment
from tapscope.run_format.stats import Stats

_STATS = b'"stats":'
_CALM_TEXT = b'"nan":0,"posinf":0,"neginf":0,'
_NONFINITE = frozenset(("nan", "posinf", "neginf", "inf", "nonfinite"))
_CALM = Stats(1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Sentinel:
    """The triggers that match one site."""

    __slots__ = ("_is_calm", "_known", "_needs_moment", "num_problems", "problem", "triggers")

    def __init__(self, triggers: Sequence[Trigger], known: Mapping[str, Any]) -> None:
        """``known`` is what the site and the rank settle."""
        self.triggers = tuple(triggers)
        self._known = {name: value for name, value in known.items() if any(name in t.names for t in triggers)}
        self._needs_moment = any(name not in STATISTICS and name not in known for t in triggers for name in t.names)
        self.problem: str | None = None
        """The first condition that could not be decided, which counts as one that does not hold."""
        self.num_problems = 0
        # Most triggers ask for NaN and infinities, and most values hold none: the text then says so at a glance.
        only_nonfinite = all(t.names <= _NONFINITE for t in triggers)
        self._is_calm = only_nonfinite and not self._asked(_CALM, {})
        self.num_problems, self.problem = 0, None

    def fired(self, text: bytes, moment: Callable[[], Moment]) -> list[tuple[Trigger, Stats]]:
        """The triggers that fire; never raises. ``text`` ends with the member ``stats`` of a record's line."""
        if self._is_calm and _CALM_TEXT in text:
            return []
        stats = Stats.from_json(json.loads(text[text.index(_STATS) + len(_STATS) :].decode()))
        values = self._known | _values(moment()) if self._needs_moment else self._known
        return [(trigger, stats) for trigger in self._asked(stats, values)]

    def _asked(self, stats: Stats, values: Mapping[str, Any]) -> list[Trigger]:
        found = []
        for trigger in self.triggers:
            try:
                if trigger.fires(stats, values):
                    found.append(trigger)
            except Exception as error:  # noqa: BLE001 - the model must go on
                self.num_problems += 1
                self.problem = self.problem or f"trigger '{trigger}': {error}"
        return found


def _values(moment: Moment) -> dict[str, Any]:
    return moment._asdict() | {"ndim": len(moment.shape), "numel": math.prod(moment.shape)}
