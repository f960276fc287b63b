"""Angles: what rounding does to the tables of a rotary embedding, the cosines and sines of position times frequency.

Both the product and the frequency are rounded relative to themselves, so an angle is off by its own size, which grows
with the position, times a rounding; its cosine and sine are between -1 and 1 at any position.
"""

import math
import re

from tapscope.comparator.facts import Place

_ROTARY = re.compile(r"(?i)rotary|rope")
_ROUNDING = 0.2 * math.sqrt(2.0) * 2.0**-24
"""Of a float32 on both sides, see :func:`.floor.unit`: angles are worked out in float32 whatever the model's dtype."""


def angle_error(cls: str, worst: Place | None) -> float:
    """Error of a row of a module's tables at the position of the row that is furthest off: of an angle in radians, one
    a position at the highest frequency. 0 of any other class of module."""
    if worst is None or not _ROTARY.search(cls):
        return 0.0
    position = worst.position
    if position is None:  # a table of its own, row by row
        position = worst.index[0] if len(worst.index) > 1 else 0
    return _ROUNDING * position
