"""Row moves: the target's rows are baseline rows of other tokens, as from stale buffers or shifted positions."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import Hypothesis

Array = np.ndarray[Any, Any]

MAX_SHIFT = 8
"""Maximum shift that is tried, in tokens."""
MIN_WIDTH = 16
"""Minimum number of columns; with fewer, the nearest row is arbitrary."""


def row_shifts(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield that every row holds the baseline row some tokens earlier or later in the same request."""
    sample = region.sample
    at = {place: i for i, place in enumerate(zip(sample.request.tolist(), sample.position.tolist(), strict=True))}
    here = list(zip(sample.request[region.rows].tolist(), sample.position[region.rows].tolist(), strict=True))
    what = "row" if sample.request[0] < 0 else "token"
    for offset in [sign * k for k in range(1, MAX_SHIFT + 1) for sign in (1, -1)]:
        source = [at.get((request, position - offset), -1) for request, position in here]
        if max(source, default=-1) < 0:
            continue
        later, many = ("earlier" if offset > 0 else "later"), abs(offset)
        sentence = f"target = baseline of {many} {what}{'s' if many > 1 else ''} {later} (shifted by {offset:+d})"
        yield Hypothesis("shift", sentence, _rows(region, np.array(source)))


def row_moves(region: ErrorRegion, requests: Sequence[str]) -> Iterator[Hypothesis]:
    """Yield rows of other requests, one row everywhere, or permuted rows, found by nearest neighbor."""
    sample = region.sample
    if len(region.columns) < MIN_WIDTH or len(sample.baseline) < 2 or not len(region.rows):
        return
    source = _nearest(region)
    if np.array_equal(source, region.rows):
        return
    name, sentence, freedom = _row_order_text(region, source, requests)
    yield Hypothesis(name, sentence, _rows(region, source), freedom)


def _rows(region: ErrorRegion, source: Array) -> Array:
    values = region.sample.baseline[np.maximum(source, 0)][:, region.columns]
    values[source < 0] = np.nan
    return values


def _nearest(region: ErrorRegion) -> Array:
    """Return the index of the baseline row nearest to each affected target row, as [affected rows]."""
    rows = np.nan_to_num(region.sample.baseline[:, region.columns])
    wanted = np.nan_to_num(region.after)
    distance = (rows * rows).sum(axis=1)[None, :] - 2.0 * (wanted @ rows.T)
    best = distance.argmin(axis=1)
    own = distance[np.arange(len(wanted)), region.rows]
    nearest: Array = np.where(own <= distance[np.arange(len(wanted)), best], region.rows, best)
    return nearest


def _row_order_text(region: ErrorRegion, source: Array, requests: Sequence[str]) -> tuple[str, str, int]:
    """Return (family, sentence, freedom) of a hypothesis on moved rows."""
    sample = region.sample
    here, there = sample.request[region.rows], sample.request[source]
    known = here[0] >= 0
    if len(set(source.tolist())) == 1 and len(source) > 1:
        where = (
            f"request {requests[int(there[0])]}, position {sample.position[source[0]]}" if known else f"row {source[0]}"
        )
        return "one row", f"every row of target = baseline of {where}", 0
    same_position = np.array_equal(sample.position[region.rows], sample.position[source])
    swaps = dict(zip(here.tolist(), there.tolist(), strict=True))
    if known and same_position and all(swaps[a] == b for a, b in zip(here.tolist(), there.tolist(), strict=True)):
        exchanges = [f"{requests[a]} holds {requests[b]}'s" for a, b in sorted(swaps.items())[:3]]
        return "requests", f"target has the rows of requests exchanged: {', '.join(exchanges)}", 0
    if len(source) == 1:
        where = (
            f"request {requests[int(there[0])]}, position {sample.position[source[0]]}" if known else f"row {source[0]}"
        )
        return "one row", f"target = baseline of {where}", 1
    if len(set(source.tolist())) == len(source) and set(source.tolist()) == set(region.rows.tolist()):
        return "row order", "target has the baseline's rows in another order", 2
    return "other rows", "target's rows are those of other tokens of the baseline", 2
