"""NgramProposer: proposes what followed the last tokens of a request where they occurred before in it.

Prompt lookup: of the earlier occurrences of the request's last tokens, the longest match is continued, and of several
the latest. Prompts that are copied from (code, documents, tool results) are continued well; nothing is learnt from
other requests, so that a proposal depends on its request alone.
"""

from collections.abc import Mapping, Sequence

from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request

_MAX_CANDIDATES = 32
"""Earlier occurrences that are compared, the latest first."""


class NgramProposer:
    """Keeps an index of each request's n-grams of the shortest length that counts as a match."""

    def __init__(self, min_match: int, max_match: int) -> None:
        """``min_match`` and ``max_match``: tokens of a match; a longer one counts as one of ``max_match``."""
        self._min, self._max = min_match, max_match
        self._indexes: dict[str, _NgramIndex] = {}

    def propose(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts]:
        """As :meth:`.Proposer.propose`."""
        proposals = {}
        for request, count in requests:
            if count == 0:
                continue
            index = self._indexes.setdefault(request.id, _NgramIndex(self._min, self._max))
            if tokens := index.continuation(request.tokens, count):
                proposals[request.id] = Drafts(tuple(tokens))
        return proposals

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._indexes.pop(request_id, None)


class _NgramIndex:
    """Where each n-gram of one request's tokens ends."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min, self._max = min_match, max_match
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def continuation(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """At most ``count`` tokens that followed the best earlier match of the last ones; empty without a match.

        A match that reaches the end of the tokens is continued by repeating itself.
        """
        size = self._min
        for end in range(max(size, self._num_indexed + 1), len(tokens)):  # not the last n-gram, which is looked for
            self._ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        candidates = self._ends.get(tuple(tokens[-size:]), []) if len(tokens) >= size else []
        best, length = 0, 0
        for end in candidates[: -_MAX_CANDIDATES - 1 : -1]:
            match_length = self._match_length(tokens, end)
            if match_length > length:
                best, length = end, match_length
            if length == self._max:
                break
        if not length:
            return ()
        period = len(tokens) - best
        return [tokens[best + i % period] for i in range(count)]

    def _match_length(self, tokens: Sequence[int], end: int) -> int:
        """Tokens before ``end`` that equal the last ones, at most ``max_match``."""
        length = self._min
        while length < min(self._max, end) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length
