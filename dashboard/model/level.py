"""Level: a magnitude as one character, on the log scale of a heat map."""

import math

_LEVELS = 9


def level_glyph(top: float, limits: tuple[float, float], *, bad: bool, zero: str) -> str:
    """A magnitude as one character, where ``limits`` are log10 of the smallest and the largest; ``·`` for nan."""
    if bad:
        return "%"
    if math.isnan(top):
        return "·"
    if top == 0.0:
        return zero
    low, high = limits
    level = (math.log10(top) - low) / (high - low) if high > low and math.isfinite(top) else 0.0
    return str(1 + min(int(level * _LEVELS), _LEVELS - 1))
