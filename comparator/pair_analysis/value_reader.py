"""Valued: what the values of a pair give, once they were read."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.layout import is_parameter
from tapscope.comparator.alignment.prepare import Prepared
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.facts import Place
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.channels import worst_channel
from tapscope.comparator.metrics.error_distribution import NOTHING, Spread, sizes_of, with_channel
from tapscope.comparator.metrics.images import image_channel
from tapscope.comparator.metrics.joined_rows import part_at
from tapscope.comparator.metrics.measure import Measured, Opened, Pairs
from tapscope.comparator.metrics.near_zero_rows import even_errors, is_lifted, own_errors, stands_out
from tapscope.comparator.metrics.softmax_condition import sharpness
from tapscope.comparator.metrics.updates import drifts, sways
from tapscope.comparator.metrics.values import values_of
from tapscope.comparator.pair_analysis.kinds import Kind
from tapscope.comparator.pair_analysis.pair_result import NO_MORE, About, Examined, More, Read
from tapscope.comparator.pair_analysis.results import place_in, recorded_size, steps_of
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


class Wanted(NamedTuple):
    """What is asked of all pairs."""

    row_map: RowMap
    backward: bool
    """Whether there are gradients, whose floors depend on how large values are."""
    norms: frozenset[str]
    """Paths of the modules that divide each row by its size."""
    convolving: frozenset[str]
    """Paths of the modules that make rows of an image of each other."""
    detail: "Callable[[str, Prepared], Detail] | None"
    """(site, pair) -> more measures; None where nobody asks for them."""


class Begun(Struct, frozen=True):
    """A pair whose values have to be read."""

    kind: Kind
    opened: Opened
    pair: Pair
    site: str
    about: About
    """What is known of it beside its values."""
    more: More = NO_MORE

    @property
    def like(self) -> Prepared:
        """It, or another of its form."""
        return self.opened.ready if self.opened.alike is None else self.kind.ready


class Reader:
    """Reads pairs that were measured together; what is found of all at once is in columns."""

    def __init__(self, found: Pairs, wanted: Wanted) -> None:
        self._found, self._wanted, self._values = found, wanted, values_of(found)
        self._num_unequal, worst = (found.seen.columns[name].tolist() for name in ("num_unequal", "worst"))
        self._is_empty = ((self._values.num_rows == 0) | (self._values.counts[1] == 0)).tolist()
        self._is_zero, self._stands_out = (
            self._values.is_zero.tolist(),
            stands_out(self._values.spreads.errors).tolist(),
        )
        self._worst = list(zip(worst, *found.at_worst(), strict=True))
        """(row that is furthest off, column of its largest difference, rank that alone holds that, places of the row
        where one side is not finite)."""

    def examined(self, one: Begun, section: int) -> Examined:
        """With what values give; raises DataError where they have to be looked at again and are not there."""
        if self._is_empty[section]:
            return self._empty(one, section)
        like, parts, num_unequal = one.like, self._found.begun(section).parts, self._num_unequal[section]
        place = self._place(one, section)
        step, steps = place.step, None
        if len(parts) > 1 and len({like.right[each.join.target].records[0].key.step for each in parts}) > 1:
            steps = steps_of(self._found[section], self._found.seen.errors_of(section), like.right)
        about, more, spread = one.about, one.more, None
        if num_unequal or self._wanted.backward:
            spread, others = self._closely(one, section)
            if "permuted" in others:
                more, about = (
                    structs.replace(more, permuted=True),
                    structs.replace(about, notes=(PERMUTED, *about.notes)),
                )
            more = structs.replace(more, **others) if others else more
        read = Read(
            basis="values",
            num_unequal=num_unequal,
            worst=place,
            values=self._values,
            place=section,
            step=step,
            steps=steps,
            spread=spread,
        )
        return Examined(one.pair, one.site, about, read, more)

    def _place(self, one: Begun, section: int) -> Place:
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

    def _empty(self, one: Begun, section: int) -> Examined:
        """A pair of which nothing had to be read: equal by its hashes, or of no elements."""
        is_known = bool(self._values.counts[1, section])
        more = structs.replace(one.more, size=recorded_size(one.opened.ready)) if self._wanted.backward else one.more
        about = one.about if is_known else structs.replace(one.about, notes=(*one.about.notes, EMPTY))
        read = Read(basis="hash" if is_known else "none", values=self._values, place=section, steps=(), spread=NOTHING)
        return Examined(one.pair, one.site, about, read, more)

    def _closely(self, one: Begun, section: int) -> tuple[Spread | None, dict[str, Any]]:
        """(spread, where it is more than the columns say; members of :class:`~.examined.More`) of a pair; of most there
        is little of that."""
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
            more["drifts"] = drifts(one.opened, found[section], found.seen[section])
            more["sways"] = sways(one.opened, found[section], found.seen[section])
        if self._wanted.backward:
            more["size"] = math.sqrt(found[section].rows.sum_sq_baseline.sum())
            if one.site.endswith(".grad") and is_off:
                sizes = sizes_of(found[section].rows)
                spread = structs.replace(spread or self._values.spread(section), sizes=sizes)
        if self._wanted.detail is not None and is_unequal:
            more["detail"] = self._wanted.detail(one.site, one.opened.ready)
        return spread, more

    def _channel(self, one: Begun, measured: Measured) -> Channel:
        """The channel that stands out most. What a convolution or its like makes has them along the second axis, and
        rows of the picture beside each other are alike; of another image it is seen which axis has one."""
        is_signal = one.site.rpartition(":")[0] in self._wanted.convolving
        image = image_channel(one.opened, measured, is_signal=is_signal)
        if is_signal:
            return image
        column = worst_channel(one.opened, measured)
        return max((column, image), key=lambda channel: abs(channel.gain) / channel.noise if channel.noise else 0.0)

    def _of_rows(self, one: Begun, section: int) -> dict[str, Any]:
        """What the floors of a few kinds of sites depend on beside their errors."""
        found = dict[str, Any]()
        if is_lifted(one.site, self._wanted.norms):
            found["own_errors"] = own_errors(self._found[section].rows)
        if one.like.layouts[0].keyed:
            found["sharpness"] = sharpness(one.opened, self._found[section])
        if self._stands_out[section]:
            errors = tuple(self._values.spreads.errors[:, section].tolist())
            here = self._found[section]
            found["even_errors"], found["even_peak"] = even_errors(here.rows, here.at_worst, errors)
        return found


def _is_same_kind(one: Begun) -> bool:
    return one.like.left[0].dtype == one.like.right[0].dtype


def _unequal_rows(measured: Measured) -> Array:
    return np.flatnonzero(measured.rows.equal < measured.rows.width)


def _is_permuted(measured: Measured, ready: Prepared) -> bool:
    """Whether some firing of which rows are not equal has equal bags: rounding never gives the same elements."""
    parts = {id(part): part for part in map(measured.part_at, _unequal_rows(measured).tolist())}
    return any(ready.equal_by_bag(part.join) for part in parts.values())
