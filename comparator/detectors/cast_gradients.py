"""Cast gradients: gradients of a tensor that one run casts and the other does not.

A tensor has one gradient. If a norm receives the residual itself, the gradient of its input is that of the residual,
summed over all consumers. If the residual is stored in a wider dtype and the norm receives a cast copy, the copy's
gradient covers the path through the norm only. Both gradients are correct, but they are not comparable.
"""

from collections.abc import Mapping, Sequence

from msgspec import structs

from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.facts import Side
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.series import Series, content_id
from tapscope.core.site import port_of

_GRADIENT = ".grad"
_REASON = "the gradient of a cast copy in one run, and of the tensor itself with all of its consumers in the other"


class CastGradients(Detector):
    """Excludes gradients that belong to a tensor in one run and to a cast copy of the tensor in the other."""

    name = "cast_gradients"
    stage = Stage.SCREEN

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        pairs = without_branches(evidence.pairs)
        return structs.replace(evidence, pairs=pairs)


def without_branches(everything: Sequence[PairResult]) -> list[PairResult]:
    """Return all results, with an exclusion reason for gradients of a tensor in one run and of a cast copy in the
    other."""
    if not any(one.site.endswith(_GRADIENT) for one in everything):
        return list(everything)
    values = {one.site: one for one in everything if one.is_matched}
    gradients = [one for one in values.values() if one.site.endswith(_GRADIENT) and not one.problem]
    shared = [_shared(gradients, side) for side in (0, 1)]
    apart = {one.site for one in gradients if any(_is_branch(one, side, shared[side], values) for side in (0, 1))}
    return [one.replace(exclusion_reason=_REASON) if one.site in apart else one for one in everything]


def _shared(gradients: Sequence[PairResult], side: int) -> Mapping[object, list[PairResult]]:
    """Map each content hash to the gradients of one run with these bytes."""
    groups: dict[object, list[PairResult]] = {}
    for one in gradients:
        if (key := content_id(series_of(one, side))) is not None:
            groups.setdefault(key, []).append(one)
    return groups


def _is_branch(
    result: PairResult, side: int, shared: Mapping[object, list[PairResult]], values: Mapping[str, PairResult]
) -> bool:
    """Return whether a gradient belongs to the tensor itself in this run, and to a copy in another dtype in the other
    run."""
    key, value = content_id(series_of(result, side)), values.get(result.site.removesuffix(_GRADIENT))
    if key is None or value is None or not port_of(result.site).startswith("in["):
        return False
    for other in shared.get(key, ()):
        shared_value = values.get(other.site.removesuffix(_GRADIENT))
        if shared_value is None or other is result or not has_one_dtype(value, shared_value, side):
            continue
        if not has_one_dtype(value, shared_value, 1 - side):
            return True
    return False


def series_of(result: PairResult, side: int) -> Series | None:
    """Return one run's series of a site: side 0 is the baseline, 1 the target."""
    return result.pair.target if side else result.pair.baseline


def has_one_dtype(result: PairResult, other: PairResult, side: int) -> bool:
    """Return whether two sites have the same dtype in one run."""
    return _dtype(result, side) == _dtype(other, side)


def _dtype(result: PairResult, side: int) -> str | None:
    chosen: Side | None = result.target if side else result.baseline
    return None if chosen is None else chosen.dtype
