"""Capture levels that single requests ask for, on top of the configuration.

With every step, a host lists the requests whose rows are to be captured (:attr:`tapscope.core.observe.StepInfo.asked`).
This applies to every site that unrestricted rules reach. A site where the configuration keeps as much or more is not
affected. Where it keeps statistics of all rows and a request asks for its rows in full, a step with that request
records those rows instead.
"""

from collections.abc import Mapping
from typing import Any

from tapscope.dumper.rules.rule import KEEPS, Keep
from tapscope.dumper.selection.rule_context import RuleContext
from tapscope.dumper.selection.site_decision import CaptureSpec, SiteDecision


class RequestDecision(SiteDecision):
    """The capture decision for one site while requests ask for capture."""

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
        """The highest level that any request may ask for."""
        return "full"

    @property
    def may_keep(self) -> bool:
        """Whether anything can be kept here."""
        return True

    def decide(self, context: RuleContext) -> CaptureSpec:
        """The rows of requests that ask for more than the configuration keeps; else what it keeps."""
        spec = self._base.decide(context)
        self.problem, self.num_problems = self._base.problem, self._base.num_problems
        here = [name for name in self._asked if name in context.requests]
        keep: Keep = max((self._asked[name] for name in here), key=KEEPS.index, default="off")
        if KEEPS.index(keep) <= KEEPS.index(spec.keep):
            return spec
        return CaptureSpec(keep, requests=frozenset(here))


def valid_requests(requests: Mapping[str, Any]) -> tuple[dict[str, Keep], str | None]:
    """The valid entries, and the problem with the first invalid one."""
    known = {name: keep for name, keep in requests.items() if keep in ("stats", "full")}
    wrong = next((name for name in requests if name not in known), None)
    return (
        known,
        None if wrong is None else f"asked[{wrong!r}]={requests[wrong]!r}: must be 'stats' or 'full'; not captured",
    )
