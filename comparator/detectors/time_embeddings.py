"""Time embeddings: sines and cosines of a time multiplied by frequencies, checked within each run.

The rounding error of a time is relative, so the error of an angle grows with the time: near 1,000 in bfloat16, the time
differs by up to 2, and so does its first angle in radians. No module has such a large condition. If each run's values
are the sinusoids of its own input, up to rounding, their distance is due to the rounding of that input. The frequencies
are those of Vaswani et al., arXiv:1706.03762, section 3.5, with the variations of diffusion libraries. Values of
another form, or of different forms in the two runs, are skipped.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.detectors.linear_gradients import chunks_of
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core import dtypes
from tapscope.core.errors import DataError

Array = np.ndarray[Any, Any]

_MAX_PERIOD = 10_000.0
_MOST_ROWS = 4096
"""Maximum number of rows of a site: an embedding of times has one row per sample."""
_ANGLE_RTOL = 2.0**-20
"""Relative error of an angle in float32; the exponents of frequencies, up to 9.2, are rounded too."""
_VALUE_EPSILONS = 2.0
"""Additional error of a value, in epsilons of the output's dtype."""


class Form(NamedTuple):
    """Layout of an embedding."""

    has_cosines_first: bool
    shift: int
    """Number subtracted from the number of frequencies in the denominator of the exponents."""
    scale: float
    """Factor applied to the time before the multiplication by frequencies."""
    is_interleaved: bool = False

    def of(self, given: Array, width: int) -> tuple[Array, Array]:
        """Return (embeddings [n, width] of times [n], their angles)."""
        half = width // 2
        frequencies = _MAX_PERIOD ** (-np.arange(half) / max(half - self.shift, 1))
        angles = self.scale * given[:, None] * frequencies
        halves = [np.sin(angles), np.cos(angles)]
        if self.has_cosines_first:
            halves.reverse()
        if self.is_interleaved:
            return np.stack(halves, 2).reshape(len(given), width), np.repeat(angles, 2, 1)
        return np.concatenate(halves, 1), np.concatenate((angles, angles), 1)


_FORMS = [Form(*each) for each in product((False, True), (0, 1), (1.0, 1000.0), (False, True))]


class TimeEmbeddings(Detector):
    """Verifies that each run's embedding is the sinusoids of its own time, and measures the distance between the
    runs."""

    name = "time_embeddings"
    stage = Stage.EXPECT

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        return structs.replace(evidence, time_embeddings=sinusoids(evidence.judged, evidence.preparer))


def sinusoids(examined: Sequence[PairResult], preparer: PairPreparer) -> Mapping[str, float]:
    """Return site -> largest error of a row, for embeddings that differ only because their times do."""
    sites = {one.site: one for one in examined if _is_compared(one)}
    errors: dict[str, float] = {}
    for given in sites.values():
        path, _, port = given.site.rpartition(":")
        one = sites.get(f"{path}:out")
        if one is None or not port.startswith("in[") or port.endswith(".grad") or not _fits(given, one):
            continue
        sides = [preparer.prepare(each.pair) for each in (given, one)]
        try:
            if _form(*(each.left for each in sides)) & _form(*(each.right for each in sides)):
                assert one.distribution is not None
                errors[one.site] = one.distribution.errors[-1]
        except DataError:
            continue
    return errors


def _is_compared(result: PairResult) -> bool:
    return result.is_matched and not result.problem and result.basis == "values" and result.distribution is not None


def _fits(given: PairResult, result: PairResult) -> bool:
    """Return whether the input has one time per row of the output, the width is even, and both sites differ."""
    before, after = given.meta.baseline, result.meta.baseline
    if before is None or after is None or result.is_equal or given.is_equal or result.is_exact or len(after.shape) < 2:
        return False
    width, num_rows = after.shape[-1], int(np.prod(after.shape[:-1]))
    return int(np.prod(before.shape)) == num_rows <= _MOST_ROWS and width >= 8 and not width % 2


def _form(given: Sequence[AssembledTensor], made: Sequence[AssembledTensor]) -> set[Form]:
    """Return the layouts that fit all values of one run."""
    forms = set(_FORMS)
    for before, after in _pairs(given, made):
        numbers, values = _values(before).ravel(), _values(after)
        if len(numbers) != len(values) or not (np.isfinite(numbers).all() and np.isfinite(values).all()):
            return set()
        step = _VALUE_EPSILONS * dtypes.epsilon(after.dtype or "")
        forms = {form for form in forms if _explains(form, numbers, values, step)}
    return forms if given and made else set()


def _explains(form: Form, numbers: Array, values: Array, step: float) -> bool:
    expected, angles = form.of(numbers, values.shape[1])
    return bool(
        (
            np.abs(values - expected) <= step * (np.abs(expected) + step) + _ANGLE_RTOL * np.abs(angles) + _ANGLE_RTOL
        ).all()
    )


def _pairs(
    given: Sequence[AssembledTensor], made: Sequence[AssembledTensor]
) -> Iterator[tuple[AssembledTensor, AssembledTensor]]:
    """Yield inputs and outputs firing by firing; raises DataError if one of them is missing."""
    if len(given) != len(made) or any(not whole.has_values for whole in (*given, *made)):
        raise DataError("not every firing has both")
    yield from zip(given, made, strict=True)


def _values(whole: AssembledTensor) -> Array:
    """Read the values as [rows, columns] float64."""
    parts = [(rows.start, columns.start, part) for rows, part, columns in chunks_of(whole)]
    if len({column for _, column, _ in parts}) != 1:
        raise DataError("its columns are split over several ranks")
    return np.concatenate([part for _, _, part in sorted(parts, key=lambda each: each[0])])
