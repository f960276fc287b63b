"""LiveDivergence: where a live model first differs from its reference, in one sentence."""

import math

from msgspec import Struct

from tapscope.core.formatting import number, plural


class LiveDivergence(Struct, frozen=True):
    """The first site of a step that differs from the reference by more than rounding explains."""

    step: int
    rank: int
    site: str
    test: str
    """``median_row``, ``worst_row`` or ``scale`` (a common factor) for errors beyond rounding, ``tolerance``,
    ``nonfinite`` or ``unequal``."""
    error: float
    limit: float
    request: str | None = None
    """With ``position``: the token row with the largest error."""
    position: int | None = None

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
