"""RoundingBound: bound the error that rounding alone can cause at a site of a live model.

The error of a module's output is the error inherited from its inputs plus the error that the module adds. The bound
assumes that the inputs have the largest error of any earlier site of the step. It further assumes that the module adds
``LOCAL_ROUNDOFFS`` unit roundoffs of the coarsest dtype of both runs. Rounding errors have no common direction, so a
common scale factor is bounded more tightly than the error of a row. `tapscope diff` uses depth, operations and the
graph, and judges more precisely.
"""

import math
from typing import NamedTuple

from tapscope.kernels.native.deviation import Deviation

LOCAL_ROUNDOFFS = 2.0
"""Relative error that one module adds, in unit roundoffs: rounding of inputs, weights and output, and of a long sum."""
MAX_ERROR_RATIO = 4.0
"""Maximum ratio of the error of the median row, or of the common scale, to the expected error."""
WORST_ROW = 8.0
"""Additional factor for the error of the worst row."""
_UNMOVED_QUANTILE = 0.25
"""Quantile of row errors used instead of the median if rows may be rerouted; assumes that this share was not."""
_MIN_ROW_ELEMENTS = 16
"""Minimum row width for the tight bound; narrower rows may be small by cancellation, with a large relative error."""


class Excess(NamedTuple):
    """A relative error that exceeds its bound."""

    test: str
    """Failed test: ``median_row``, ``scale`` or ``worst_row``."""
    error: float
    limit: float


class RoundingBound:
    """Running bound for the sites of one step, checked in firing order."""

    def __init__(self, *, rows_may_move: bool = False) -> None:
        """``rows_may_move``: individual rows may differ arbitrarily, as rounding routes tokens to other experts."""
        self._rows_may_move = rows_may_move
        self.share = _UNMOVED_QUANTILE if rows_may_move else None
        """Quantile argument for :func:`.deviation`; None for the median."""
        self._inherited = 0.0
        self._inherited_scale = 0.0
        self.is_exact = True
        """Whether all sites of this step have been equal so far."""

    def begin(self) -> None:
        """Reset the inherited errors for a new step."""
        self._inherited = self._inherited_scale = 0.0
        self.is_exact = True

    def check(self, deviation: Deviation, unit_roundoff: float) -> Excess | None:
        """Return the first test whose error exceeds the rounding bound; None if rounding explains the deviation.

        Explained errors are added to the error that later sites may inherit.
        """
        middle, worst = deviation.typical, deviation.worst
        # Distance of the best common factor from 1.
        scale = abs(deviation.dot / deviation.power - 1.0) if deviation.power > 0.0 else 0.0
        limit = MAX_ERROR_RATIO * math.hypot(LOCAL_ROUNDOFFS * unit_roundoff, self._inherited)
        spread = WORST_ROW if deviation.width < _MIN_ROW_ELEMENTS else 1.0
        limit *= spread
        # Random errors change the scale only by their size divided by the root of the number of elements.
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
