"""NgramProposer: draft the tokens that followed an earlier occurrence of the request's last tokens.

This is prompt lookup: of the earlier occurrences of the request's last tokens, the longest match is continued; of
equally long matches, the latest. It works well for outputs that copy from the prompt (code, documents, tool results).
Proposals depend only on the request itself; nothing is learned from other requests.
"""

from collections.abc import Mapping, Sequence

from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request

_MAX_CANDIDATES = 32
"""Maximum number of earlier occurrences to compare, latest first."""


class NgramProposer:
    """Proposer with an n-gram index per request; n is the minimum match length."""

    def __init__(self, min_match: int, max_match: int) -> None:
        """``min_match`` and ``max_match``: match length in tokens; longer matches count as ``max_match``."""
        self._min, self._max = min_match, max_match
        self._indexes: dict[str, _NgramIndex] = {}

    def propose(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts]:
        """Continue the best match of each request, see :meth:`.Proposer.propose`."""
        proposals = {}
        for request, count in requests:
            if count == 0:
                continue
            index = self._indexes.setdefault(request.id, _NgramIndex(self._min, self._max))
            if tokens := index.continuation(request.tokens, count):
                proposals[request.id] = Drafts(tuple(tokens))
        return proposals

    def forget(self, request_id: str) -> None:
        """Drop the index of a finished request."""
        self._indexes.pop(request_id, None)


class _NgramIndex:
    """End positions of each n-gram in one request's tokens."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min, self._max = min_match, max_match
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def continuation(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Return up to ``count`` tokens that followed the best earlier match of the last tokens; empty without a match.

        A match whose continuation reaches the end of ``tokens`` repeats periodically.
        """
        size = self._min
        for end in range(max(size, self._num_indexed + 1), len(tokens)):  # excludes the last n-gram, which is the query
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
        """Return how many tokens before ``end`` equal the last tokens, at most ``max_match``."""
        length = self._min
        while length < min(self._max, end) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length
