"""Masks: attention mask entries that are visible on one side only."""

from typing import Any

import numpy as np

from tapscope.comparator.alignment.layout import is_mask
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_join import RowJoin, indices
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.assembly.blocks import row_axes
from tapscope.comparator.metrics import chunks
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.core import formatting

Array = np.ndarray[Any, Any]

_AXES = 4
"""Number of axes of a mask: batch, heads, queries, keys."""
MASKED_VALUE = -1e3
"""Additive masks hide a key with this value or less, down to minus infinity."""


def explain_mask(site: str, ready: PreparedPair, row_map: RowMap) -> Explanation | None:
    """Return an explanation that lists the entries visible in only one side's mask.

    None if the site is not a mask, judging by port and values, or if both masks are equal.
    """
    if not is_mask(site):
        return None
    odd = ""
    counts: tuple[list[Array], list[Array]] = ([], [])
    num_rows = 0
    for chunk in chunks.rows(ready):
        one, two = _visible(chunk.baseline), _visible(chunk.target)
        if one is None or two is None or one.shape != two.shape:
            return None
        num_rows += len(one)
        for numbers, places in zip(counts, (two & ~one, one & ~two), strict=True):
            numbers.append(places.sum(1))
        if not odd and (one != two).any():
            row, column = np.argwhere(one != two)[0].tolist()
            odd = _place(ready, row_map, chunk.join, chunk.row + row, column)
    if not odd:
        return None
    sentences = [
        _describe_counts(word, np.concatenate(numbers))
        for word, numbers in zip(("shows", "hides"), counts, strict=True)
    ]
    sentence = f"target's mask {' and '.join(filter(None, sentences))}, the first {odd}"
    return Explanation("mask", sentence, 1.0, num_rows=num_rows)


def _place(ready: PreparedPair, row_map: RowMap, join: RowJoin, row: int, column: int) -> str:
    """Return text such as ``of request r0 at query position 5, key position 6 ([0,0,5,6])``.

    The index refers to the target's tensor, as expected by `show --slice`. Positions are omitted if the key axis is not
    the step's own tokens.
    """
    whole = ready.right[join.target]
    shape, axes = whole.shape, ready.layouts[1].axes or row_axes(whole.shape)
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    at = int(indices(join.target_rows)[row]) if join.target_rows != slice(None) else row
    index = dict(zip(axes, np.unravel_index(at, [shape[axis] for axis in axes]), strict=True))
    index |= dict(zip(rest, np.unravel_index(column, [shape[axis] for axis in rest]), strict=True))
    where = [int(index[axis]) for axis in range(len(shape))]
    sentence = f"at [{','.join(map(str, where))}]"
    grid = row_map.target.of(whole.records[0])
    if grid is None or len(grid.grid) != 2 or len(shape) != _AXES or shape[2:] != (grid.grid[1], grid.grid[1]):
        return sentence
    pairs = grid.pairs.reshape(grid.grid)
    line = pairs[where[0]] if shape[0] == grid.grid[0] else pairs[0]
    request = next((row_map.requests[int(row_map.pair_request[pair])] for pair in line if pair >= 0), "")
    query, key = (
        f"position {row_map.pair_position[line[i]]}" if line[i] >= 0 else "padding" for i in (where[2], where[3])
    )
    of = f"of request {request} " if request and shape[0] == grid.grid[0] else ""
    return f"{of}at query {query}, key {key} ([{','.join(map(str, where))}])"


def _describe_counts(word: str, counts: Array) -> str:
    """Return text such as ``shows 1 place more in each of 12 rows``; empty if all counts are 0."""
    positive = counts[counts > 0]
    if not len(positive):
        return ""
    rows = formatting.plural(len(positive), "row")
    if len(set(positive.tolist())) == 1:
        each = "each of " if len(positive) > 1 else ""
        return f"{word} {formatting.plural(int(positive[0]), 'place')} more in {each}{rows}"
    return f"{word} {formatting.plural(int(positive.sum()), 'place')} more in {rows}"


def _visible(values: Array) -> Array | None:
    """Return which entries are visible; None if the values are not a mask."""
    if values.dtype == np.bool_:
        return values
    if values.dtype.kind in "iu":
        return None
    wide = values.astype(np.float32)
    seen: Array = wide == 0.0
    return seen if (seen | (wide <= MASKED_VALUE)).all() else None
