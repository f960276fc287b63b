"""Proposer: what guesses the tokens that may follow those of a request."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request


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
