"""Concatenated steps: treat all steps of a site as one tensor, for runs without row tables that split the same rows
into different steps."""

from collections.abc import Sequence

from msgspec import structs

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.runs.derived_tensor import ConcatParts, FusedLayout
from tapscope.comparator.runs.series import Series
from tapscope.core import dims as dims_grammar
from tapscope.core.errors import DimsError
from tapscope.core.site import is_parameter

FLAG = "--concat-steps"
_ROWS = ("t", "s", "b")


def concat_steps(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs with all firings of each tensor concatenated in order into one firing per side.

    The concatenation axis is the token axis of the dims (``t``, else ``s``, else ``b``), or else the first axis.
    """
    return [_joined(pair) for pair in pairs]


def num_rows(series: Series) -> int | None:
    """Return the total number of rows over all steps; None if the steps cannot be concatenated."""
    if not _may_be_joined(series):
        return None
    axis = _axis(series)
    return sum(firing.records[0].shape[axis] for firing in series.firings)


def _joined(pair: Pair) -> Pair:
    sides = (pair.baseline, pair.target)
    if any(one is None or not _may_be_joined(one) for one in sides):
        return pair
    one, two = (_as_one(series) for series in sides if series is not None)
    return structs.replace(pair, baseline=one, target=two)


def _may_be_joined(series: Series) -> bool:
    if series.derivation is not None or not series.is_tensor or is_parameter(series.site):
        return False
    return all(len(firing.records[0].shape) == len(series.shape) > 0 for firing in series.firings)


def _as_one(series: Series) -> Series:
    if len(series.firings) < 2:
        return series
    alone = tuple(structs.replace(series, firings=(firing,)) for firing in series.firings)
    joined = ConcatParts(FusedLayout((series.site,), _axis(series)))
    return Series(series.site, series.group, (series.firings[0],), joined, alone)


def _axis(series: Series) -> int:
    text = series.first.dims
    try:
        dims = dims_grammar.parse(text) if text else None
    except DimsError:
        return 0
    places = [dims.index(name) for name in _ROWS] if dims is not None else []
    return next((place for place in places if place is not None), 0)
