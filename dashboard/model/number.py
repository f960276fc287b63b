"""Numbers for programs and for people."""

import math
from dataclasses import dataclass

from tapscope.comparator.report.answer import share
from tapscope.core import formatting


@dataclass(frozen=True, slots=True)
class Number:
    """A raw value, null in JSON where it is missing or not finite, and the text that every front end shows."""

    value: float | None
    text: str


MISSING = Number(None, "-")


def magnitude(value: float | None) -> Number:
    """Two significant digits: ``1.9e+00``."""
    return MISSING if value is None else Number(value if math.isfinite(value) else None, formatting.number(value))


def fixed(value: float) -> Number:
    """Six decimals, for a cosine: ``0.999998``."""
    return Number(value if math.isfinite(value) else None, f"{value:.6f}")


def ratio(value: float) -> Number:
    """An error in multiples of its noise floor: ``0.45``, ``2.6``, ``130``."""
    return Number(value if math.isfinite(value) else None, share(value))


def count(value: int) -> Number:
    """An integer with thousands separators: ``1,132``."""
    return Number(float(value), formatting.count(value))
