"""Choice differences: the number of rows with different experts or keys, and how many of the k choices differ.

A router chooses k experts for a row, an indexer of sparse attention k keys. The order of the choices is irrelevant, so
they are compared as sets.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.chosen_scores import rows_of
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.facts import ChoiceDifference
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.routers import ExpertChoosers
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.core.formatting import plural
from tapscope.core.site import module_of

Array = np.ndarray[Any, Any]

_KEYS = re.compile(r"(?:^|\.)indexer:(?:out|tap\[topk_indices\])$")
"""Sites of the keys that an indexer chooses: positions, with -1 for an unused entry."""


class ChoiceDifferences(Detector):
    """Counts the choices of experts and keys that only one run makes."""

    name = "choice_differences"
    stage = Stage.SCREEN

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        choosers = ExpertChoosers(module_of(one.site) for one in evidence.pairs)
        changes, pairs = dict(evidence.changes), list(evidence.pairs)
        for i, one in enumerate(pairs):
            if one.exclusion_reason or not one.is_exact or not one.num_unequal:
                continue
            are_keys = _KEYS.search(one.site) is not None
            if not are_keys and not choosers.may_choose(one.site):
                continue
            difference = _difference(evidence.preparer, one)
            if difference is None:
                continue
            sentence = _sentence(difference, "keys" if are_keys else "experts")
            pairs[i] = one.replace(choices=difference, notes=(sentence, *one.notes))
            if are_keys and not difference.num_rows_different:
                changes[one.site] = ChoiceChange("keys have no order")
        return structs.replace(evidence, pairs=pairs, changes=changes)


def _difference(preparer: PairPreparer, result: PairResult) -> ChoiceDifference | None:
    """Compare the choices as sets; None for integers that are not choices.

    Choices are neither negative, except for -1, nor repeated within a row.
    """
    rows = rows_of(preparer, result)
    if rows is None or rows.baseline.ndim != 2 or rows.baseline.dtype.kind not in "iu":
        return None
    sides = [np.sort(side.astype(np.int64), axis=1) for side in (rows.baseline, rows.target)]
    if any(side.min() < -1 or _repeats(side).any() for side in sides):
        return None
    shared = _repeats(np.sort(np.concatenate(sides, axis=1), axis=1)).sum(1)
    different = np.maximum(*((side >= 0).sum(1) for side in sides)) - shared
    return ChoiceDifference(
        k=rows.baseline.shape[1],
        num_rows=result.rows.num_compared or _num_rows(result),
        num_rows_different=int((different > 0).sum()),
        num_different=int(different.sum()),
        max_different=int(different.max()),
    )


def _repeats(ordered: Array) -> Array:
    """Return where an element of [rows, n], sorted by row, equals the previous one; negative elements do not count."""
    return np.asarray((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))


def _num_rows(result: PairResult) -> int:
    shape: Sequence[int] = result.baseline.shape if result.baseline is not None else ()
    return int(np.prod(shape[:-1]))


def _sentence(difference: ChoiceDifference, what: str) -> str:
    if not difference.num_rows_different:
        return f"the same {what} in another order"
    share = f"{difference.num_rows_different:,} of {plural(difference.num_rows, 'row')}"
    return (
        f"{difference.max_different} of {difference.k} {what} differ in the worst row; other {what} in {share}, "
        f"{difference.num_different:,} choices in all"
    )
