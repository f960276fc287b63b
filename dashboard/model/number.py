"""Numbers as raw values with formatted text."""

import math
from dataclasses import dataclass

from tapscope.comparator.report.answer import share
from tapscope.core import formatting


@dataclass(frozen=True, slots=True)
class Number:
    """Raw value and the text that all front ends show; the value is None if missing or not finite."""

    value: float | None
    text: str


MISSING = Number(None, "-")


def magnitude(value: float | None) -> Number:
    """Format with two significant digits: ``1.9e+00``."""
    return MISSING if value is None else Number(value if math.isfinite(value) else None, formatting.number(value))


def fixed(value: float) -> Number:
    """Format with six decimals, for a cosine: ``0.999998``."""
    return Number(value if math.isfinite(value) else None, f"{value:.6f}")


def ratio(value: float) -> Number:
    """Format an error in multiples of its noise floor: ``0.45``, ``2.6``, ``130``."""
    return Number(value if math.isfinite(value) else None, share(value))


def count(value: int) -> Number:
    """Format an integer with thousands separators: ``1,132``."""
    return Number(float(value), formatting.count(value))
