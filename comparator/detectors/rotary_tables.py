"""Rotary tables: cosines and sines of RoPE, judged per element by the rounding of its angle and its value.

A row of such a table contains fast and slow pairs of columns. A floor is relative to the row, of which a slow pair,
whose sines are small, is a tiny part: a wrong frequency of one pair passes. But no error is inherited, because
positions are integers: an element is rounded once to its dtype, by half a unit in its last place, and its angle in
float32.

If the dtypes of the runs differ, so may the frequencies: ``model.to(torch.bfloat16)`` rounds them too. The angle is
then known to half a unit of the coarser dtype, relative to itself.

A module with two outputs computes such tables if the squares of the baseline's outputs add up to the same number in
every element. A change below half a unit in the last place of every element is not detectable.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.metrics import chunks
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding, Verdict, as_different
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.core.formatting import number

Array = np.ndarray[Any, Any]

_MAX_COLUMNS = 1024
"""Maximum number of columns of a table: those of a head."""
_ANGLE_RTOL = 2.0**-22
"""Relative error of an angle that float32 computes from a position and a frequency; the fastest pair turns by 1 radian
per position."""
_KERNEL = 2.0**-20
"""Error of a cosine in float32."""


class _Excess(NamedTuple):
    """The element of a table that exceeds its rounding by the largest factor."""

    ratio: float
    error: float
    limit: float
    column: int


class RotaryTables(Detector):
    """Detects elements of a rotary embedding's tables that differ by more than one rounding."""

    name = "rotary_tables"
    stage = Stage.REVIEW

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        findings = list(evidence.findings)
        sites = {one.site: (order, one) for order, one in enumerate(evidence.judged)}
        for path in [site.removesuffix(":out[1]") for site in sites if site.endswith(":out[1]")]:
            both = [sites[site] for port in (0, 1) if (site := f"{path}:out[{port}]") in sites]
            if len(both) < 2 or not any(_passes_by_size(findings[order]) for order, _ in both):
                continue
            for (order, _), excess in zip(both, _excesses([one for _, one in both], evidence.preparer), strict=False):
                if excess.ratio > 1.0 and _passes_by_size(findings[order]):
                    findings[order] = _with_excess(findings[order], excess)
        return structs.replace(evidence, findings=findings)


def _passes_by_size(finding: Finding) -> bool:
    return finding.verdict is Verdict.CLOSE and finding.basis == "values" and finding.judged_by == "rounding"


def _excesses(both: Sequence[PairResult], preparer: PairPreparer) -> list[_Excess]:
    """Return the worst elements of the cosines and the sines; empty if the baseline's values are not such tables, or
    positions are unknown."""
    if not all(_may_be_table(one) for one in both):
        return []
    ready, position = [preparer.prepare(one.pair) for one in both], preparer.row_map.pair_position
    worst, turn = [_Excess(0.0, 0.0, 0.0, 0)] * 2, np.ones(1)
    dtype_steps = [max(map(dtypes.epsilon, one.dtypes)) if len(set(one.dtypes)) > 1 else 0.0 for one in both]
    try:
        for parts in zip(*(chunks.rows(each, every=True) for each in ready), strict=False):
            pairs, others = (part.join.pairs for part in parts)
            if pairs is None or others is None or not np.array_equal(pairs, others):
                return []
            if parts[0].row != parts[1].row or parts[0].baseline.shape != parts[1].baseline.shape:
                return []
            epsilon = max(dtypes.epsilon(one.dtypes[0]) for one in both)
            if not _is_table(parts[0].baseline, parts[1].baseline, epsilon):
                return []
            rows = slice(parts[0].row, parts[0].row + len(parts[0].baseline))
            at = position[pairs[rows]]
            for row in np.flatnonzero(at == 1)[:1]:  # the angle at position 1 is the frequency
                turn = np.abs(np.arctan2(*(part.baseline[row].astype(np.float64) for part in parts[::-1])))
            off = (_ANGLE_RTOL + 0.5 * max(dtype_steps) * turn) * at[:, None]
            each = [
                _worst(part, off * (np.abs(other.baseline.astype(np.float64)) + off), one.dtypes)
                for part, other, one in zip(parts, parts[::-1], both, strict=True)
            ]
            worst = [max(pair, key=lambda excess: excess.ratio) for pair in zip(worst, each, strict=True)]
    except DataError:
        return []
    return worst


def _may_be_table(result: PairResult) -> bool:
    side = result.meta.baseline
    is_compared = side is not None and result.is_matched and not result.problem and result.rows.num_compared > 0
    return is_compared and side is not None and bool(side.shape) and side.shape[-1] <= _MAX_COLUMNS


def _is_table(cosine: Array, sine: Array, epsilon: float) -> bool:
    """Return whether the squares of both add up to the same number everywhere, which is 1 unless the table is
    scaled."""
    sums = np.square(cosine, dtype=np.float64) + np.square(sine, dtype=np.float64)
    radius = float(np.median(sums)) if sums.size else 0.0
    return radius > 0.0 and bool((np.abs(sums - radius) <= (epsilon + _KERNEL) * radius).all())


def _worst(part: chunks.Chunk, inherited: Array, names: Sequence[str]) -> _Excess:
    """Return the worst element of a chunk, given the error that each element inherits from its angle.

    A cosine inherits the error of the angle times its sine, and a sine that error times its cosine.
    """
    one, two = (side.astype(np.float64) for side in (part.baseline, part.target))
    size = np.maximum(np.abs(one), np.abs(two))
    power = np.exp2(np.frexp(size)[1] - 1)
    steps = sum(np.maximum(dtypes.epsilon(name) * power, dtypes.smallest(name)) for name in names)
    limit = 0.5 * steps + inherited + _KERNEL
    ratio = np.abs(one - two) / limit
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    return _Excess(float(ratio[at]), float(np.abs(one - two)[at]), float(limit[at]), part.column + int(at[1]))


def _with_excess(finding: Finding, excess: _Excess) -> Finding:
    note = (
        f"an element of column {excess.column} is off by {number(excess.error)}, and the rounding of its angle and its "
        f"value explains {number(excess.limit)}"
    )
    return as_different(finding, "rotary_table", note)
