"""Position ids: a constant offset between the positions of the two runs."""

import numpy as np

from tapscope.comparator.explain.sample import Sample
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.core.formatting import plural
from tapscope.core.site import port_of

MIN_ROWS = 2
"""Minimum number of rows that differ."""
_NAMED = 3


def explain_position_ids(sample: Sample, requests: tuple[str, ...]) -> Explanation | None:
    """Return an explanation by one offset for all rows that differ, or one per request.

    None if the site does not hold positions, or if offsets vary within a request.
    """
    if "position" not in port_of(sample.site) or not sample.is_integer or sample.request[0] < 0:
        return None
    off = (sample.target - sample.baseline).astype(np.int64)
    rows = np.asarray(off.any(axis=1))
    if int(rows.sum()) < MIN_ROWS:
        return None
    offsets: dict[str, int] = {}
    for request in np.unique(sample.request[rows]):
        here = np.unique(off[rows & (sample.request == request)])
        if len(here) != 1 or not here[0]:
            return None
        offsets[requests[int(request)]] = int(here[0])
    distinct = sorted(set(offsets.values()))
    if len(distinct) == 1:
        (offset,) = distinct
        text = f"target's positions are {_describe_offset(offset)} ({'+' if offset > 0 else '−'}{abs(offset)})"
    else:
        named = [f"{_describe_offset(offset)} in request {name}" for name, offset in list(offsets.items())[:_NAMED]]
        text = f"target's positions are {', '.join(named)}: as if padding, or what came before, were counted"
    steps = np.unique(sample.step[rows])
    where = (
        f" in {plural(len(steps), 'step')} from step {steps[0]} on" if len(steps) < len(np.unique(sample.step)) else ""
    )
    return Explanation("positions", text + where, 1.0, num_rows=len(sample.baseline))


def _describe_offset(offset: int) -> str:
    return f"{abs(offset)} {'higher' if offset > 0 else 'lower'}"
