"""Proposer: interface of algorithms that draft the next tokens of requests."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan


class Proposer(Protocol):
    """Drafts tokens. A rejected draft costs time but never changes an output."""

    def propose(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts]:
        """Return request id -> drafts for the running requests, each given with the maximum draft depth.

        Called before each step. A depth of 0 means no drafts for the request in this step.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Free the state of a finished request."""
        ...


@runtime_checkable
class AheadProposer(Proposer, Protocol):
    """Proposer that can also draft on the device, after a step whose tokens the host does not know yet."""

    def drafts_ahead(self, request: Request) -> bool:
        """Return whether :meth:`draft_ahead` can draft for the request."""
        ...

    def draft_ahead(self, plan: StepPlan, requests: Sequence[tuple[Request, int]], sampled: Tensor) -> int:
        """Start drafting after the step ``plan``, which was launched last; return the number of draft model steps.

        ``requests``: the step's requests, each with its draft depth, 0 for no drafts. ``sampled`` [rows]: the step's
        sampled tokens on the device. Returns 0 if drafting on the device is not possible.
        """
        ...

    def take_ahead(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts] | None:
        """Return the started drafts in the form of :meth:`propose`; None if none were started.

        The tokens are placeholders (:func:`.pending_drafts`) until :meth:`read_ahead`.
        """
        ...

    def read_ahead(self) -> Mapping[str, Sequence[int]]:
        """Return request id -> draft tokens for the drafts last returned by :meth:`take_ahead`; waits for the device.

        A request may have more tokens than were taken.
        """
        ...

    def is_behind(self, requests: Sequence[Request]) -> bool:
        """Return whether :meth:`propose` would have rows to compute even if no request gets drafts."""
        ...

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Start computing the rows that :meth:`is_behind` detects, while steps of the target may be in flight."""
        ...
