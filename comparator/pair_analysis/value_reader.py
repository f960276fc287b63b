"""Value reader: turn measured values into the results of pairs."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs

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
from tapscope.comparator.pair_analysis.row_place import (
    RowsByStep,
    place_in,
    recorded_norm,
    rows_by_step,
    step_results_of,
    summand_ratio,
)
from tapscope.comparator.pair_analysis.shape_class import ShapeClass
from tapscope.core.site import is_parameter, module_of
from tapscope.kernels.native.channels import MIN_ROWS, Channel

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail

Array = np.ndarray[Any, Any]

MAX_UNEQUAL = 64
"""Maximum number of unequal integer rows that are kept per pair."""
MAX_PLACES = 4096
"""Maximum number of cached places per shape class."""
EMPTY = "empty on both sides"
PERMUTED = "permuted: the same elements in another order"


class ReaderOptions(NamedTuple):
    """What to compute for every pair."""

    row_map: RowMap
    has_gradients: bool
    """Whether the runs have gradients, whose floors depend on the magnitude of values."""
    norm_modules: frozenset[str]
    """Paths of the modules that normalize each row."""
    conv_modules: frozenset[str]
    """Paths of the modules that combine neighboring rows of an image, such as convolutions."""
    detail: "Callable[[str, PreparedPair], Detail] | None"
    """(site, pair) -> detailed metrics; None if they are not requested."""


class PendingRead(Struct, frozen=True):
    """A pair whose values remain to be read."""

    shape_class: ShapeClass
    lazy_pair: LazyPair
    pair: Pair
    site: str
    meta: PairMeta
    """Facts that do not depend on the values of the pair."""
    extras: PairExtras = NO_EXTRAS

    @property
    def template(self) -> PreparedPair:
        """A prepared pair with the same shape key (this pair or another): layouts, dtypes and plan are equal."""
        return self.lazy_pair.prepared if self.lazy_pair.batched is None else self.shape_class.prepared


class ValueReader:
    """Computes the results of pairs that were measured together; quantities common to all pairs are computed in
    columns."""

    def __init__(self, batch: MeasuredBatch, wanted: ReaderOptions) -> None:
        self._measured, self._options, self._values = batch, wanted, metric_columns_of(batch)
        self._num_unequal, worst = (batch.overviews.columns[name].tolist() for name in ("num_unequal", "worst"))
        self._is_empty = ((self._values.num_rows == 0) | (self._values.counts[1] == 0)).tolist()
        self._is_zero, self._stands_out = (
            self._values.is_zero.tolist(),
            has_outlier_row(self._values.distributions.errors).tolist(),
        )
        self._by_step: dict[int, RowsByStep | None] = {}
        """id of the joins that are read (shared by pairs with one shape key) -> their rows by step."""
        self._worst = list(zip(worst, *batch.at_worst(), strict=True))
        """(row with the largest error, column of its largest difference, only rank that holds that column, number of
        elements of the row that are not finite on one side only)."""

    def result_of(self, pending: PendingRead, section: int) -> PairResult:
        """Return the result of a pair with its values. Raises DataError if values must be read again and are
        missing."""
        if self._is_empty[section]:
            return self._empty(pending, section)
        parts, num_unequal = self._measured.section_of(section).parts, self._num_unequal[section]
        place = self._place(pending, section)
        step, steps = place.step, None
        if id(parts) not in self._by_step:
            self._by_step[id(parts)] = rows_by_step(parts, pending.template.right)
        if (by_step := self._by_step[id(parts)]) is not None:
            steps = step_results_of(self._measured[section], self._measured.overviews.errors_of(section), by_step)
        meta, extras, spread = pending.meta, pending.extras, None
        if num_unequal or self._options.has_gradients:
            spread, others = self._detailed(pending, section)
            if "permuted" in others:
                extras, meta = (
                    structs.replace(extras, permuted=True),
                    structs.replace(meta, notes=(PERMUTED, *meta.notes)),
                )
            extras = structs.replace(extras, **others) if others else extras
        values = PairValues(
            basis="values",
            num_unequal=num_unequal,
            worst=place,
            columns=self._values,
            index=section,
            step=step,
            steps=steps,
            distribution=spread,
        )
        return PairResult(pending.pair, pending.site, meta, values, extras)

    def _place(self, pending: PendingRead, section: int) -> Place:
        """Return the place of the row with the largest error."""
        row, column, rank, mismatch = self._worst[section]
        at = None if mismatch else column
        places = {} if pending.lazy_pair.batched is None else pending.shape_class.places
        place = places.get((row, at, rank))
        if place is None:
            part = part_at(self._measured.section_of(section).parts, row)
            place = place_in(part, row, at, rank, pending.template, self._options.row_map)
            if len(places) < MAX_PLACES:
                places[row, at, rank] = place
        return place

    def _empty(self, pending: PendingRead, section: int) -> PairResult:
        """Return the result of a pair of which no rows were read: equal by its hashes, or without elements."""
        is_known = bool(self._values.counts[1, section])
        extras = (
            structs.replace(pending.extras, baseline_norm=recorded_norm(pending.lazy_pair.prepared))
            if self._options.has_gradients
            else pending.extras
        )
        meta = pending.meta if is_known else structs.replace(pending.meta, notes=(*pending.meta.notes, EMPTY))
        values = PairValues(
            basis="hash" if is_known else "none", columns=self._values, index=section, steps=(), distribution=NO_ERROR
        )
        return PairResult(pending.pair, pending.site, meta, values, extras)

    def _detailed(self, pending: PendingRead, section: int) -> tuple[ErrorDistribution | None, dict[str, Any]]:
        """Return (error distribution, if it is more detailed than the columns; further fields of
        :class:`PairExtras`)."""
        batch, exact, extras, spread = self._measured, pending.shape_class.is_exact, dict[str, Any](), None
        is_unequal, is_off = self._num_unequal[section] > 0, not self._is_zero[section]
        if exact:
            unequal = _unequal_rows(batch[section])
            extras["unequal_rows"] = tuple(batch[section].pairs[unequal[:MAX_UNEQUAL]].tolist())
        if is_unequal and _is_same_kind(pending) and pending.lazy_pair.may_be_permuted:
            extras |= {"permuted": True} if _is_permuted(batch[section], pending.lazy_pair.prepared) else {}
        if is_unequal and is_off and not exact:
            if (
                batch.num_rows(section) >= MIN_ROWS and not pending.template.layouts[0].has_key_axis
            ):  # with a key axis, columns are tokens
                channel = self._channel(pending, batch[section])
                spread = with_channel(self._values.distribution(section), channel)
            extras |= self._of_rows(pending, section)
            if ratio := summand_ratio(pending.template, batch[section]):  # a batched pair has no partial sums
                extras["summand_ratio"] = ratio
        if is_parameter(pending.site):
            extras["parameter_updates"] = parameter_updates_of(
                pending.lazy_pair, batch[section], batch.overviews[section]
            )
            extras["update_sensitivity"] = update_sensitivity_of(
                pending.lazy_pair, batch[section], batch.overviews[section]
            )
        if self._options.has_gradients:
            extras["baseline_norm"] = math.sqrt(batch[section].rows.sum_sq_baseline.sum())
            if pending.site.endswith(".grad") and is_off:
                sizes = row_sizes_of(batch[section].rows)
                spread = structs.replace(spread or self._values.distribution(section), row_sizes=sizes)
        if self._options.detail is not None and is_unequal:
            extras["detail"] = self._options.detail(pending.site, pending.lazy_pair.prepared)
        return spread, extras

    def _channel(self, pending: PendingRead, measured: MeasuredPair) -> Channel:
        """Return the channel that stands out most.

        A convolution has its channels along the second axis, and neighboring rows of an image are similar; for other
        images both axes are checked.
        """
        is_signal = module_of(pending.site) in self._options.conv_modules
        image = image_channel(pending.lazy_pair, measured, is_signal=is_signal)
        if is_signal:
            return image
        column = worst_channel(pending.lazy_pair, measured)
        return max((column, image), key=lambda channel: abs(channel.gain) / channel.noise if channel.noise else 0.0)

    def _of_rows(self, pending: PendingRead, section: int) -> dict[str, Any]:
        """Return quantities other than errors on which the floors of a few kinds of sites depend."""
        members = dict[str, Any]()
        if is_norm_input(pending.site, self._options.norm_modules):
            members["row_relative_errors"] = row_relative_errors_of(self._measured[section].rows)
        if pending.template.layouts[0].has_key_axis:
            members["softmax_condition"] = softmax_condition_of(pending.lazy_pair, self._measured[section])
        if self._stands_out[section]:
            errors = tuple(self._values.distributions.errors[:, section].tolist())
            measured = self._measured[section]
            members["errors_above_typical"], members["peak_above_typical"] = errors_above_typical(
                measured.rows, measured.at_worst, errors
            )
        return members


def _is_same_kind(pending: PendingRead) -> bool:
    return pending.template.left[0].dtype == pending.template.right[0].dtype


def _unequal_rows(measured: MeasuredPair) -> Array:
    return np.flatnonzero(measured.rows.equal < measured.rows.width)


def _is_permuted(measured: MeasuredPair, ready: PreparedPair) -> bool:
    """Return whether a firing with unequal rows has equal multiset hashes: rounding never leaves the multiset of
    elements unchanged."""
    parts = {id(part): part for part in map(measured.part_at, _unequal_rows(measured).tolist())}
    return any(ready.equal_by_multiset_hash(part.join) for part in parts.values())
