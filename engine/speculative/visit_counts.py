"""VisitCounts: how often a draft model has computed each position of one request."""

from collections.abc import Sequence
from itertools import groupby


class VisitCounts:
    """Counts of computations per position.

    Rejected drafts and preemptions cause positions to be computed again, which recordings distinguish as visits.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []

    def add(self, positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Count the rows at ``positions`` and return runs of (rows, how often they were computed before).

        Rows of a tree at the same position have the same visit.
        """
        self._counts += [0] * (max(positions) + 1 - len(self._counts))
        visits = [self._counts[position] for position in positions]
        for position in set(positions):
            self._counts[position] += 1
        return tuple((len(list(run)), visit) for visit, run in groupby(visits))
