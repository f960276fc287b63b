"""Proposer: what guesses the tokens that may follow those of a request."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan


class Proposer(Protocol):
    """Guesses tokens; a wrong guess costs time and never changes an output."""

    def propose(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts]:
        """Request id -> tokens that may follow, for the running requests, given with how far ahead to propose.

        Called before each step; 0: the request gets no drafts now.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended: free what is kept for it."""
        ...


@runtime_checkable
class AheadProposer(Proposer, Protocol):
    """May also draft on the device, after a step whose tokens the host does not know yet."""

    def drafts_ahead(self, request: Request) -> bool:
        """Whether :meth:`draft_ahead` may draft for the request."""
        ...

    def draft_ahead(self, plan: StepPlan, requests: Sequence[tuple[Request, int]], sampled: Tensor) -> int:
        """Start drafting after the step ``plan``, which was launched last, for its requests, given with how far ahead,
        0 for those without drafts; ``sampled`` [rows] are its tokens on the device. Returns how many steps of the draft
        model that takes: 0 if it cannot be done.
        """
        ...

    def take_ahead(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts] | None:
        """What :meth:`propose` returns, from the drafts that were started; None if none were.

        The tokens are placeholders (:func:`.pending_drafts`) until :meth:`read_ahead`.
        """
        ...

    def read_ahead(self) -> Mapping[str, Sequence[int]]:
        """Request -> the drafts that :meth:`take_ahead` returned last, or more; waits for the device."""
        ...

    def is_behind(self, requests: Sequence[Request]) -> bool:
        """Whether :meth:`propose` has something to compute even if none of the requests gets drafts."""
        ...

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Start computing that, while steps of the target may be in flight."""
        ...
