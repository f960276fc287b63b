"""Row map: pairs each token row of the target with its token row of the baseline.

A row is identified by (request, position, visit). A row is comparable while its own token and all earlier tokens of its
request are equal on both sides. From the first difference on, the request is *forked*, and its rows are excluded.
"""

from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.forks import Fork
from tapscope.comparator.runs.grids import SideRows

Array = np.ndarray[Any, Any]

PADDING, FORKED, UNALIGNED, RECOMPUTED, REPLACED = -1, -2, -3, -4, -5
"""Codes in a slot table for slots without a row pair.

In order: padding; after a fork; never computed by the other run; recomputed by one run only (preemption); computed for
a token that was replaced later (a rejected draft), or by the draft model of one run only.
"""
_NONE = np.empty(0, np.int64)


class RowMap(Struct, frozen=True):
    """The row pairs of two runs, and counts of the rows that could not be paired."""

    baseline: SideRows
    target: SideRows
    requests: tuple[str, ...] = ()
    """Names of the paired requests in the baseline."""
    pair_request: Array = _NONE
    """[pairs] index into :attr:`requests`."""
    pair_position: Array = _NONE
    """[pairs] position in the baseline."""
    pair_visit: Array = _NONE
    pair_branch: Array = _NONE
    """[pairs] see :attr:`.RowSpan.branch`."""
    num_forked: tuple[int, int] = (0, 0)
    """Rows excluded after a fork, of (baseline, target)."""
    num_unaligned: tuple[int, int] = (0, 0)
    """Rows whose token the other run never computed, of (baseline, target)."""
    num_recomputed: tuple[int, int] = (0, 0)
    """Rows that only one run recomputed (preemption), of (baseline, target)."""
    num_replaced: tuple[int, int] = (0, 0)
    """Rows computed for a token that was replaced later (a rejected draft), or by the draft model of one run only, of
    (baseline, target)."""
    late_starts: tuple[tuple[str, int] | None, tuple[str, int] | None] = (None, None)
    """For (baseline, target), the first request that begins later than in the other run, as (request, its first
    position)."""
    forks: tuple[Fork, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences on assumptions and on what could not be checked."""
    problems: tuple[str, ...] = ()
    """Sentences on why the data is partial."""

    @property
    def num_pairs(self) -> int:
        """Number of comparable row pairs."""
        return len(self.pair_request)

    @property
    def known(self) -> bool:
        """Whether both runs recorded the rows of their steps."""
        return bool(self.baseline) and bool(self.target)
