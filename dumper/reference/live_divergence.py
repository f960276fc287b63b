"""LiveDivergence: the first site of a step at which a live model differs from its reference."""

import math

from msgspec import Struct

from tapscope.core.formatting import number, plural


class LiveDivergence(Struct, frozen=True):
    """The first site of a step whose difference from the reference exceeds the rounding bound or the tolerance."""

    step: int
    rank: int
    site: str
    test: str
    """Failed test: ``median_row``, ``worst_row`` or ``scale`` (a common factor) for errors beyond rounding;
    ``tolerance``, ``nonfinite`` or ``unequal``."""
    error: float
    """Measured error in the unit of the test: relative error, or number of elements."""
    limit: float
    """Largest acceptable error."""
    request: str | None = None
    """Request of the token row with the largest error; None if unknown."""
    position: int | None = None
    """Position of the token row with the largest error; None if unknown."""

    def __str__(self) -> str:
        where = "" if self.position is None else f"; worst in request {self.request}, position {self.position}"
        return f"{self.site}: {self._describe_error()}{where}"

    def _describe_error(self) -> str:
        if self.test == "nonfinite":
            return f"{plural(int(self.error), 'value')} not finite in one run only"
        if self.test == "unequal":
            return "not equal" if math.isnan(self.error) else f"{plural(int(self.error), 'element')} not equal"
        if self.test == "scale":
            return f"a common scale off by {self.error:.1%}, rounding explains {self.limit:.2%}"
        if self.test == "tolerance":
            return f"error {number(self.error)}, tolerance {number(self.limit)}"
        return f"error {number(self.error)}, rounding explains {number(self.limit)}"
