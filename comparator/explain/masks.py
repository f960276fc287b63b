"""Masks: which places of an attention mask are seen on one side alone."""

from typing import Any

import numpy as np

from tapscope import text
from tapscope.comparator.alignment.prepare import Prepared
from tapscope.comparator.measures import chunks
from tapscope.comparator.verdicts.explanation import Explanation

Array = np.ndarray[Any, Any]

HIDDEN = -1e3
"""What scores are lowered by where nothing is to be seen: at least this, up to infinity."""


def masks(site: str, ready: Prepared) -> Explanation | None:
    """What the target's mask shows or hides beside the baseline's; None where the site holds no mask, as its port says
    and its values, or both show the same."""
    if "mask" not in site.rpartition(":")[2]:
        return None
    odd: list[tuple[int, int]] = []
    counts: tuple[list[Array], list[Array]] = ([], [])
    num_rows = 0
    for chunk in chunks.rows(ready):
        one, two = _seen(chunk.baseline), _seen(chunk.target)
        if one is None or two is None or one.shape != two.shape:
            return None
        num_rows += len(one)
        for found, places in zip(counts, (two & ~one, one & ~two), strict=True):
            found.append(places.sum(1))
        if not odd:
            odd = [(chunk.row + int(row), int(column)) for row, column in np.argwhere(one != two)[:1]]
    if not odd:
        return None
    said = [_said(word, np.concatenate(found)) for word, found in zip(("shows", "hides"), counts, strict=True)]
    first = f"the first in row {odd[0][0]}, column {odd[0][1]}"
    return Explanation("mask", f"target's mask {' and '.join(filter(None, said))}, {first}", 1.0, "", (), num_rows)


def _said(word: str, counts: Array) -> str:
    """``shows 1 place more in each of 12 rows``; empty where it does nowhere."""
    found = counts[counts > 0]
    if not len(found):
        return ""
    if len(set(found.tolist())) == 1:
        each = "each of " if len(found) > 1 else ""
        return f"{word} {text.plural(int(found[0]), 'place')} more in {each}{text.plural(len(found), 'row')}"
    return f"{word} {text.plural(int(found.sum()), 'place')} more in {text.plural(len(found), 'row')}"


def _seen(values: Array) -> Array | None:
    """Where something is seen; None where this is no mask."""
    if values.dtype == np.bool_:
        return values
    if values.dtype.kind in "iu":
        return None
    wide = values.astype(np.float32)
    seen: Array = wide == 0.0
    return seen if (seen | (wide <= HIDDEN)).all() else None
