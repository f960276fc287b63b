"""Flips: unequal token ids that rounding explains.

Integers must be equal. Two things excuse a sampled token that is not: its request forks right behind it (then the
rows behind are set aside, and the fork is reported), or the logits it was chosen from are so close together that the
error of their row decides between the two tokens, and that error is itself no more than rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.comparator.assemble import Whole
from tapscope.comparator.blocks import Rows, blocks
from tapscope.comparator.examine import Examined
from tapscope.comparator.layout import Layout
from tapscope.comparator.prepare import Prepared, Preparer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Flip:
    """Why the unequal integers of a site are no fault of the target."""

    sentence: str
    logits: str = ""
    """Site whose errors explain them, if that one is within its floor; empty when forks do."""


def explain_flips(examined: Sequence[Examined], preparer: Preparer) -> Mapping[str, Flip]:
    """Site -> explanation, for the sites whose unequal integers all have one."""
    rows = preparer.row_map
    parted = {(f.index, f.position - 1) for f in rows.forks if not f.in_prompt}
    found: dict[str, Flip] = {}
    for i, one in enumerate(examined):
        # More unequal rows than are kept, or rows without a place, are no handful of near ties.
        if not one.num_unequal or one.num_unequal > len(one.unequal) or min(one.unequal) < 0:
            continue
        places = [(int(rows.pair_request[p]), int(rows.pair_position[p])) for p in one.unequal]
        rest = [pair for pair, place in zip(one.unequal, places, strict=True) if place not in parted]
        if not rest:
            found[one.site] = Flip(f"{one.num_unequal} unequal, each where its request's tokens part")
            continue
        logits = next((e for e in reversed(examined[:i]) if _is_logits(e)), None)
        if logits is not None and all(_near_tie(preparer, one, logits, pair) for pair in rest):
            found[one.site] = Flip(
                f"{one.num_unequal} unequal, each a near tie: the logits of {logits.site} are closer together than "
                "their own error",
                logits.site,
            )
    return found


def _is_logits(one: Examined) -> bool:
    port, path = one.site.rpartition(":")[2], one.site.rpartition(":")[0]
    return one.spread is not None and not one.is_exact and (port == "out[logits]" or path.endswith("lm_head"))


def _near_tie(preparer: Preparer, tokens: Examined, logits: Examined, pair: int) -> bool:
    """Whether the baseline prefers its token over the target's by no more than the row's errors can turn around."""
    chosen, scores = (_row_pair(preparer.prepare(one.pair), pair) for one in (tokens, logits))
    if chosen is None or scores is None:
        return False
    (mine,), (other,) = (side.astype(np.int64) for side in chosen) if len(chosen[0]) == 1 else ((-1,), (-1,))
    before, after = scores
    if not min(mine, other) >= 0 or max(mine, other) >= len(before) or len(before) != len(after):
        return False
    return bool(before[mine] - before[other] <= 2.0 * np.abs(before - after).max())


def _row_pair(ready: Prepared, pair: int) -> tuple[Array, Array] | None:
    """The values of one row pair on both sides, [width] float64 each; None where it was not joined."""
    for join in ready.plan.joins:
        at = np.flatnonzero(join.pairs == pair) if join.pairs is not None else np.empty(0, np.int64)
        if len(at):
            left = _row(ready.left[join.baseline], ready.layouts[0], join.baseline_rows, int(at[0]))
            return left, _row(ready.right[join.target], ready.layouts[1], join.target_rows, int(at[0]))
    return None


def _row(whole: Whole, layout: Layout, rows: Rows, at: int) -> Array:
    assert whole.piece is not None
    index = rows.start + at if isinstance(rows, slice) else int(rows[at])
    one = np.array([index])
    found = [np.asarray(b.rows(one)[0], dtype=np.float64) for b in blocks(whole.piece, whole.run, layout.axes)]
    return np.concatenate(found)
