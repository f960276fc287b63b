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
from tapscope.dumper.selection.site_decision import CaptureSpec, RuleContext, SiteDecision


class RequestDecision(SiteDecision):
    """What is kept at one site while requests ask for it."""

    __slots__ = ("_asked", "_base")

    def __init__(self, base: SiteDecision, requests: Mapping[str, Keep]) -> None:
        super().__init__()
        self._base = base
        self._asked = requests
        self.static = None
        self.needs_value = base.needs_value
        self.triggers = base.triggers

    @property
    def most(self) -> Keep:
        """What any request may ask for."""
        return "full"

    @property
    def may_keep(self) -> bool:
        """Whether anything can be kept here: what was asked for."""
        return True

    def decide(self, context: RuleContext) -> CaptureSpec:
        """The rows of the requests in the step that ask for more than the configuration keeps; else what it does."""
        spec = self._base.decide(context)
        self.problem, self.num_problems = self._base.problem, self._base.num_problems
        here = [name for name in self._asked if name in context.requests]
        keep: Keep = max((self._asked[name] for name in here), key=KEEPS.index, default="off")
        if KEEPS.index(keep) <= KEEPS.index(spec.keep):
            return spec
        return CaptureSpec(keep, requests=frozenset(here))


def valid_requests(requests: Mapping[str, Any]) -> tuple[dict[str, Keep], str | None]:
    """The wishes of a step, and what is wrong with the first one that cannot be granted."""
    known = {name: keep for name, keep in requests.items() if keep in ("stats", "full")}
    wrong = next((name for name in requests if name not in known), None)
    return (
        known,
        None if wrong is None else f"asked[{wrong!r}]={requests[wrong]!r}: must be 'stats' or 'full'; not captured",
    )
