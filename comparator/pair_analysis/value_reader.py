"""Valued: what the values of a pair give, once they were read."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.layout import is_parameter
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.facts import Place
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.channels import worst_channel
from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution, row_sizes_of, with_channel
from tapscope.comparator.metrics.images import image_channel
from tapscope.comparator.metrics.joined_rows import part_at
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import MeasuredBatch, MeasuredPair
from tapscope.comparator.metrics.metric_columns import metric_columns_of
from tapscope.comparator.metrics.near_zero_rows import (
    errors_above_typical,
    has_outlier_row,
    is_norm_input,
    row_relative_errors_of,
)
from tapscope.comparator.metrics.softmax_condition import softmax_condition_of
from tapscope.comparator.metrics.updates import parameter_updates_of, update_sensitivity_of
from tapscope.comparator.pair_analysis.pair_result import NO_EXTRAS, PairExtras, PairMeta, PairResult, PairValues
from tapscope.comparator.pair_analysis.row_place import place_in, recorded_norm, step_results_of
from tapscope.comparator.pair_analysis.shape_class import ShapeClass
from tapscope.kernels.native.channels import MIN_ROWS, Channel

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail

Array = np.ndarray[Any, Any]

MAX_UNEQUAL = 64
"""Unequal integer rows that are kept."""
MAX_PLACES = 4096
"""Places of a form that are kept."""
EMPTY = "empty on both sides"
PERMUTED = "permuted: the same elements in another order"


class ReaderOptions(NamedTuple):
    """What is asked of all pairs."""

    row_map: RowMap
    backward: bool
    """Whether there are gradients, whose floors depend on how large values are."""
    norms: frozenset[str]
    """Paths of the modules that divide each row by its size."""
    convolving: frozenset[str]
    """Paths of the modules that make rows of an image of each other."""
    detail: "Callable[[str, PreparedPair], Detail] | None"
    """(site, pair) -> more measures; None where nobody asks for them."""


class PendingRead(Struct, frozen=True):
    """A pair whose values have to be read."""

    kind: ShapeClass
    opened: LazyPair
    pair: Pair
    site: str
    about: PairMeta
    """What is known of it beside its values."""
    more: PairExtras = NO_EXTRAS

    @property
    def like(self) -> PreparedPair:
        """It, or another of its form."""
        return self.opened.ready if self.opened.alike is None else self.kind.ready


class ValueReader:
    """Reads pairs that were measured together; what is found of all at once is in columns."""

    def __init__(self, found: MeasuredBatch, wanted: ReaderOptions) -> None:
        self._found, self._wanted, self._values = found, wanted, metric_columns_of(found)
        self._num_unequal, worst = (found.seen.columns[name].tolist() for name in ("num_unequal", "worst"))
        self._is_empty = ((self._values.num_rows == 0) | (self._values.counts[1] == 0)).tolist()
        self._is_zero, self._stands_out = (
            self._values.is_zero.tolist(),
            has_outlier_row(self._values.spreads.errors).tolist(),
        )
        self._worst = list(zip(worst, *found.at_worst(), strict=True))
        """(row that is furthest off, column of its largest difference, rank that alone holds that, places of the row
        where one side is not finite)."""

    def examined(self, one: PendingRead, section: int) -> PairResult:
        """With what values give; raises DataError where they have to be looked at again and are not there."""
        if self._is_empty[section]:
            return self._empty(one, section)
        like, parts, num_unequal = one.like, self._found.begun(section).parts, self._num_unequal[section]
        place = self._place(one, section)
        step, steps = place.step, None
        if len(parts) > 1 and len({like.right[each.join.target].records[0].key.step for each in parts}) > 1:
            steps = step_results_of(self._found[section], self._found.seen.errors_of(section), like.right)
        about, more, spread = one.about, one.more, None
        if num_unequal or self._wanted.backward:
            spread, others = self._closely(one, section)
            if "permuted" in others:
                more, about = (
                    structs.replace(more, permuted=True),
                    structs.replace(about, notes=(PERMUTED, *about.notes)),
                )
            more = structs.replace(more, **others) if others else more
        read = PairValues(
            basis="values",
            num_unequal=num_unequal,
            worst=place,
            values=self._values,
            place=section,
            step=step,
            steps=steps,
            spread=spread,
        )
        return PairResult(one.pair, one.site, about, read, more)

    def _place(self, one: PendingRead, section: int) -> Place:
        """That of the row that is furthest off."""
        row, column, rank, mismatch = self._worst[section]
        at = None if mismatch else column
        known = {} if one.opened.alike is None else one.kind.places
        found = known.get((row, at, rank))
        if found is None:
            part = part_at(self._found.begun(section).parts, row)
            found = place_in(part, row, at, rank, one.like, self._wanted.row_map)
            if len(known) < MAX_PLACES:
                known[row, at, rank] = found
        return found

    def _empty(self, one: PendingRead, section: int) -> PairResult:
        """A pair of which nothing had to be read: equal by its hashes, or of no elements."""
        is_known = bool(self._values.counts[1, section])
        more = structs.replace(one.more, size=recorded_norm(one.opened.ready)) if self._wanted.backward else one.more
        about = one.about if is_known else structs.replace(one.about, notes=(*one.about.notes, EMPTY))
        read = PairValues(
            basis="hash" if is_known else "none", values=self._values, place=section, steps=(), spread=NO_ERROR
        )
        return PairResult(one.pair, one.site, about, read, more)

    def _closely(self, one: PendingRead, section: int) -> tuple[ErrorDistribution | None, dict[str, Any]]:
        """(error distribution, where more of it is known than the columns say; members of :class:`PairExtras`)."""
        found, exact, more, spread = self._found, one.kind.is_exact, dict[str, Any](), None
        is_unequal, is_off = self._num_unequal[section] > 0, not self._is_zero[section]
        if exact:
            odd = _unequal_rows(found[section])
            more["unequal"] = tuple(found[section].pairs[odd[:MAX_UNEQUAL]].tolist())
        if is_unequal and _is_same_kind(one) and one.opened.may_be_permuted:
            more |= {"permuted": True} if _is_permuted(found[section], one.opened.ready) else {}
        if is_unequal and is_off and not exact:
            if found.num_rows(section) >= MIN_ROWS and not one.like.layouts[0].keyed:  # else its columns are tokens
                channel = self._channel(one, found[section])
                spread = with_channel(self._values.spread(section), channel)
            more |= self._of_rows(one, section)
        if is_parameter(one.site):
            more["drifts"] = parameter_updates_of(one.opened, found[section], found.seen[section])
            more["sways"] = update_sensitivity_of(one.opened, found[section], found.seen[section])
        if self._wanted.backward:
            more["size"] = math.sqrt(found[section].rows.sum_sq_baseline.sum())
            if one.site.endswith(".grad") and is_off:
                sizes = row_sizes_of(found[section].rows)
                spread = structs.replace(spread or self._values.spread(section), sizes=sizes)
        if self._wanted.detail is not None and is_unequal:
            more["detail"] = self._wanted.detail(one.site, one.opened.ready)
        return spread, more

    def _channel(self, one: PendingRead, measured: MeasuredPair) -> Channel:
        """The channel that stands out most. What a convolution or its like makes has them along the second axis, and
        rows of the picture beside each other are alike; of another image it is seen which axis has one."""
        is_signal = one.site.rpartition(":")[0] in self._wanted.convolving
        image = image_channel(one.opened, measured, is_signal=is_signal)
        if is_signal:
            return image
        column = worst_channel(one.opened, measured)
        return max((column, image), key=lambda channel: abs(channel.gain) / channel.noise if channel.noise else 0.0)

    def _of_rows(self, one: PendingRead, section: int) -> dict[str, Any]:
        """What the floors of a few kinds of sites depend on beside their errors."""
        found = dict[str, Any]()
        if is_norm_input(one.site, self._wanted.norms):
            found["own_errors"] = row_relative_errors_of(self._found[section].rows)
        if one.like.layouts[0].keyed:
            found["sharpness"] = softmax_condition_of(one.opened, self._found[section])
        if self._stands_out[section]:
            errors = tuple(self._values.spreads.errors[:, section].tolist())
            here = self._found[section]
            found["even_errors"], found["even_peak"] = errors_above_typical(here.rows, here.at_worst, errors)
        return found


def _is_same_kind(one: PendingRead) -> bool:
    return one.like.left[0].dtype == one.like.right[0].dtype


def _unequal_rows(measured: MeasuredPair) -> Array:
    return np.flatnonzero(measured.rows.equal < measured.rows.width)


def _is_permuted(measured: MeasuredPair, ready: PreparedPair) -> bool:
    """Whether some firing of which rows are not equal has equal bags: rounding never gives the same elements."""
    parts = {id(part): part for part in map(measured.part_at, _unequal_rows(measured).tolist())}
    return any(ready.equal_by_bag(part.join) for part in parts.values())
