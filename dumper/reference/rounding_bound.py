"""RoundingBound: how far a site of a live model may be from the reference by rounding alone.

The error of a module's output is what its inputs carry and what it adds. As a bound, the inputs carry the largest error
that any earlier site of the step has, and the module adds ``LOCAL_ROUNDOFFS`` unit roundoffs of the coarsest dtype of
both runs. Rounding has no direction, so a common scale is bounded more tightly than the error of a row.
`tapscope diff` knows depth, operations and the graph, and judges more exactly.
"""

import math
from typing import NamedTuple

from tapscope.kernels.native.deviation import Deviation

LOCAL_ROUNDOFFS = 2.0
"""Unit roundoffs of relative error that one module adds: of inputs, weights and output, and of a long sum."""
MAX_ERROR_RATIO = 4.0
"""How many times the expected error the median row, or the common scale, may have."""
WORST_ROW = 8.0
"""How many times as much a single row may have."""
_UNMOVED_QUANTILE = 0.25
"""Quantile of the rows that counts instead of the median where rows may move: at least that share has not."""
_MIN_ROW_ELEMENTS = 16
"""A row of fewer elements may be small by cancellation: its relative error says little."""


class Excess(NamedTuple):
    """An error beyond its bound."""

    test: str
    """``median_row``, ``scale`` or ``worst_row``."""
    error: float
    limit: float


class RoundingBound:
    """The bound for the sites of one step, in the order in which they fire."""

    def __init__(self, *, rows_may_move: bool = False) -> None:
        """``rows_may_move``: single rows may differ by any amount (tokens that take other experts after rounding)."""
        self._rows_may_move = rows_may_move
        self.share = _UNMOVED_QUANTILE if rows_may_move else None
        """For :func:`.deviation`."""
        self._inherited = 0.0
        self._inherited_scale = 0.0
        self.is_exact = True
        """Whether no site of this step has had an error so far."""

    def begin(self) -> None:
        """A step begins."""
        self._inherited = self._inherited_scale = 0.0
        self.is_exact = True

    def check(self, deviation: Deviation, unit_roundoff: float) -> Excess | None:
        """The first error of a site that rounding does not explain; None if it explains all.

        What follows may inherit errors that rounding explains.
        """
        middle, worst = deviation.typical, deviation.worst
        # How far the best common factor is from 1.
        scale = abs(deviation.dot / deviation.power - 1.0) if deviation.power > 0.0 else 0.0
        limit = MAX_ERROR_RATIO * math.hypot(LOCAL_ROUNDOFFS * unit_roundoff, self._inherited)
        spread = WORST_ROW if deviation.width < _MIN_ROW_ELEMENTS else 1.0
        limit *= spread
        # Errors without a direction add to the scale only as one over the root of the number of elements.
        by_chance = MAX_ERROR_RATIO * middle / math.sqrt(max(1, deviation.num_elements))
        scale_limit = spread * MAX_ERROR_RATIO * math.hypot(unit_roundoff, self._inherited_scale) + by_chance
        tests = [("median_row", middle, limit), ("scale", scale, scale_limit)]
        if not self._rows_may_move:
            tests.append(("worst_row", worst, WORST_ROW * limit))
        for test, error, bound in tests:
            if error > bound:
                return Excess(test, error, bound)
        self._inherited = max(self._inherited, middle)
        self._inherited_scale = max(self._inherited_scale, scale - by_chance)
        self.is_exact = self.is_exact and not worst
        return None
