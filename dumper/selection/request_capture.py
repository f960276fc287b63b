"""Per-request capture levels, applied on top of the configuration.

With every step, a host lists the requests whose rows are to be captured (:attr:`tapscope.core.observe.StepInfo.asked`).
The requested levels apply to every site that unrestricted rules reach, unless the configuration already keeps the same
level or a higher one. Suppose that the configuration keeps statistics of all rows and a request asks for full capture:
a step with that request then records the rows of the request in full instead of the statistics.
"""

from collections.abc import Mapping
from typing import Any

from tapscope.dumper.rules.rule import KEEPS, Keep
from tapscope.dumper.selection.rule_context import RuleContext
from tapscope.dumper.selection.site_decision import CaptureSpec, SiteDecision


class RequestDecision(SiteDecision):
    """The capture decision for one site, with per-request capture levels on top of a base decision."""

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
        """The highest level that a request may ask for."""
        return "full"

    @property
    def may_keep(self) -> bool:
        """Always true: any request may ask for capture."""
        return True

    def decide(self, context: RuleContext) -> CaptureSpec:
        """Return a spec for the rows of asking requests if their level exceeds the base decision's, else the latter."""
        spec = self._base.decide(context)
        self.problem, self.num_problems = self._base.problem, self._base.num_problems
        here = [name for name in self._asked if name in context.requests]
        keep: Keep = max((self._asked[name] for name in here), key=KEEPS.index, default="off")
        if KEEPS.index(keep) <= KEEPS.index(spec.keep):
            return spec
        return CaptureSpec(keep, requests=frozenset(here))


def valid_requests(requests: Mapping[str, Any]) -> tuple[dict[str, Keep], str | None]:
    """Return (valid entries of ``requests``, description of the first invalid entry or None)."""
    known = {name: keep for name, keep in requests.items() if keep in ("stats", "full")}
    wrong = next((name for name in requests if name not in known), None)
    return (
        known,
        None if wrong is None else f"asked[{wrong!r}]={requests[wrong]!r}: must be 'stats' or 'full'; not captured",
    )
