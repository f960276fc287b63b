"""Asked: what single requests ask for themselves, over what the configuration keeps.

A host tells with every step which of its requests want their rows captured
(:attr:`tapscope.core.observe.StepInfo.asked`).
Such a wish is about everything that rules for everything reach. A site of which the configuration keeps as much or
more is kept as ever; where everybody's statistics are kept and a request wants its rows in full, a step that it is in
has those rows instead.
"""

from collections.abc import Mapping
from typing import Any

from tapscope.dumper.rules.rule import KEEPS, Keep
from tapscope.dumper.selection.site_decision import Choice, Moment, Taking


class AskedChoice(Choice):
    """What is kept at one site while requests ask for it."""

    __slots__ = ("_asked", "_base")

    def __init__(self, base: Choice, asked: Mapping[str, Keep]) -> None:
        super().__init__()
        self._base = base
        self._asked = asked
        self.static = None
        self.needs_value = base.needs_value
        self.sentinel = base.sentinel

    @property
    def may_keep(self) -> bool:
        """Whether anything can be kept here: what was asked for."""
        return True

    def decide(self, moment: Moment) -> Taking:
        """The rows of the requests in the step that ask for more than the configuration keeps; else what it does."""
        taking = self._base.decide(moment)
        self.problem, self.num_problems = self._base.problem, self._base.num_problems
        here = [name for name in self._asked if name in moment.requests]
        keep: Keep = max((self._asked[name] for name in here), key=KEEPS.index, default="off")
        if KEEPS.index(keep) <= KEEPS.index(taking.keep):
            return taking
        return Taking(keep, requests=frozenset(here))


def checked(asked: Mapping[str, Any]) -> tuple[dict[str, Keep], str | None]:
    """The wishes of a step, and what is wrong with the first one that cannot be granted."""
    known = {name: keep for name, keep in asked.items() if keep in ("stats", "full")}
    wrong = next((name for name in asked if name not in known), None)
    return (
        known,
        None if wrong is None else f"asked[{wrong!r}]={asked[wrong]!r}: must be 'stats' or 'full'; not captured",
    )
