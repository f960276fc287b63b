"""VisitCounts: how often a draft model has computed each position of one request."""

from collections.abc import Sequence
from itertools import groupby


class VisitCounts:
    """Rejected drafts and preemption make it compute positions again, which are other visits in a recording."""

    def __init__(self) -> None:
        self._counts: list[int] = []

    def add(self, positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Runs (rows, how often they were computed before) of rows at ``positions``, which are now computed again.

        Rows of a tree at the same position are the same visit.
        """
        self._counts += [0] * (max(positions) + 1 - len(self._counts))
        visits = [self._counts[position] for position in positions]
        for position in set(positions):
            self._counts[position] += 1
        return tuple((len(list(run)), visit) for visit, run in groupby(visits))
