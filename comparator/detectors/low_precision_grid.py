"""Low-precision grid: rows of the target whose values are all FP8 numbers, unlike those of the baseline.

A cast through FP8 may be smaller than a wide floor. But it puts all values on the grid of the format: by chance, n
values of p significant bits have their last p - 4 bits zero once in 16^n. One row is sufficient evidence: a token that
attends only to itself receives its value exactly as stored in the cache.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.metrics import chunks
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding, Verdict, as_different
from tapscope.core import dtypes
from tapscope.core.errors import DataError

Array = np.ndarray[Any, Any]

_MIN_FLOOR_SHARE = 0.15
"""Minimum error of checked findings, as a fraction of their floor; a cast through FP8 changes a value by 3 %."""
_MAX_FINDINGS = 256
"""Maximum number of findings to check; those nearest to their floor come first."""
_MAX_ELEMENTS = 1 << 20
"""Maximum number of elements read per finding."""
_MIN_VALUES = 16
"""Minimum number of nonzero values, and of distinct values, in a row."""
_SIGNIFICANT_BITS = {"float8_e5m2": 3, "float8_e4m3fn": 4}
"""Format -> number of significant bits."""
_ZERO_MANTISSA_BITS = np.uint32((1 << 24 - max(_SIGNIFICANT_BITS.values())) - 1)
"""Mantissa bits of a float32 that are zero for all numbers of these formats."""
_WIDER_DTYPES = frozenset({"float32", "bfloat16", "float16"})


class _Cast(Struct, frozen=True):
    """Rows of a site that contain only FP8 numbers."""

    count: int
    """Number of rows."""
    pair: int
    """Row pair of the first of these rows; -1 without token rows."""
    name: str
    """Name of the format."""


class LowPrecisionGrid(Detector):
    """Detects rows of the target that contain only FP8 numbers."""

    name = "low_precision_grid"
    stage = Stage.REVIEW

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        findings = with_coarse(evidence.findings, evidence.judged, evidence.preparer)
        return structs.replace(evidence, findings=findings)


def with_coarse(findings: Sequence[Finding], examined: Sequence[PairResult], preparer: PairPreparer) -> list[Finding]:
    """Return the findings, with ``differs`` for those that contain only FP8 numbers despite a small error.

    Skipped if either run reports an 8-bit KV cache.
    """
    reviewed = list(findings)
    if any(_is_narrow(str(run.manifest.get("kv_cache_dtype", ""))) for run in (preparer.baseline, preparer.target)):
        return reviewed
    near = sorted((f for f in findings if _is_near(f)), key=lambda f: -f.ratio)[:_MAX_FINDINGS]
    for finding in near:
        try:
            cast = _cast(examined[finding.order], preparer)
        except DataError:
            continue
        if cast is not None:
            reviewed[finding.order] = _with_cast(finding, cast, preparer)
    return reviewed


def _is_near(finding: Finding) -> bool:
    passed = finding.verdict is Verdict.CLOSE and finding.basis == "values" and finding.judged_by == "rounding"
    if not passed or finding.ratio < _MIN_FLOOR_SHARE or finding.baseline is None or finding.target is None:
        return False
    return finding.baseline.dtype in _WIDER_DTYPES and finding.target.dtype in _WIDER_DTYPES


def _is_narrow(name: str) -> bool:
    return name.startswith(("fp8", "float8", "int8"))


def _cast(result: PairResult, preparer: PairPreparer) -> _Cast | None:
    count, first, name, left = 0, -1, "", _MAX_ELEMENTS
    for chunk in chunks.rows(preparer.prepare(result.pair)):
        if chunk.baseline.shape != chunk.target.shape or left <= 0:
            break
        left -= chunk.target.size
        if not _may_be_few(chunk.target):
            continue
        used = _bits(chunk.target)
        odd = (
            (used <= max(_SIGNIFICANT_BITS.values()))
            & (_bits(chunk.baseline) > max(_SIGNIFICANT_BITS.values()))
            & _is_rich(chunk.target)
        )
        if not odd.any():
            continue
        at = int(np.argmax(odd))
        if not count:
            first = -1 if chunk.join.pairs is None else int(chunk.join.pairs[chunk.row + at])
            name = next(each for each, bits in _SIGNIFICANT_BITS.items() if used[at] <= bits)
        count += int(odd.sum())
    return _Cast(count, first, name) if count else None


def _may_be_few(values: Array) -> bool:
    """Return whether any row may consist of values with few significant bits: a quick test that is rarely true."""
    together = np.bitwise_or.reduce(values.astype(np.float32).view(np.uint32), axis=1)
    return bool((together & _ZERO_MANTISSA_BITS == 0).any())


def _bits(values: Array) -> Array:
    """Return the maximum number of significant bits of the values in each row, [rows].

    Rows with nonfinite or subnormal values get 24, because these values have few significant bits for another reason.
    """
    wide = np.ascontiguousarray(values.astype(np.float32))
    words = wide.view(np.uint32)
    least = np.float32(2.0**-14 if values.dtype == np.float16 else 2.0**-126)
    odd = (~np.isfinite(wide) | ((np.abs(wide) < least) & (wide != 0.0))).any(1)
    together = np.bitwise_or.reduce(words & np.uint32(0x7FFFFF), axis=1)
    lowest = together & (~together + np.uint32(1))
    zeros = np.where(together > 0, np.log2(np.maximum(lowest, 1)).astype(np.int64), 23)
    bits: Array = np.where(odd, 24, 24 - zeros)
    return bits


def _is_rich(values: Array) -> Array:
    """Return whether each row has enough nonzero and distinct values to decide, [rows]."""
    ordered = np.sort(values.astype(np.float32), axis=1)
    kinds = (np.diff(ordered, axis=1) != 0.0).sum(1) + 1
    is_rich: Array = ((values != 0).sum(1) >= _MIN_VALUES) & (kinds >= _MIN_VALUES)
    return is_rich


def _with_cast(finding: Finding, cast: _Cast, preparer: PairPreparer) -> Finding:
    where = ""
    if cast.pair >= 0:
        where = f", the first at position {int(preparer.row_map.pair_position[cast.pair])}"
    many = f"{cast.count:,} rows hold" if cast.count > 1 else "a row holds"
    note = f"{many} only {dtypes.short(cast.name)} numbers in the target{where}, and not in the baseline: a cast"
    return as_different(finding, "fp8_grid", note)
