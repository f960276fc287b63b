"""Valued: what the values of a pair give, once they were read."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.channels import worst_channel
from tapscope.comparator.finding import Numbers, StepResult
from tapscope.comparator.joined_rows import part_at
from tapscope.comparator.kinds import Facts, Kind
from tapscope.comparator.layout import is_parameter
from tapscope.comparator.lifts import even_errors, is_lifted, own_errors, stands_out
from tapscope.comparator.measure import Measured, Opened, Pairs
from tapscope.comparator.prepare import Prepared
from tapscope.comparator.results import numbers_of, place_in, recorded_size, steps_of
from tapscope.comparator.rowmap import RowMap
from tapscope.comparator.sharpness import sharpness
from tapscope.comparator.spread import NOTHING, Spread, sizes_of, spreads_of, with_channel
from tapscope.comparator.updates import drifts, sways
from tapscope.kernels.native.channels import MIN_ROWS

if TYPE_CHECKING:
    from tapscope.comparator.detail import Detail

MAX_UNEQUAL = 64
"""Unequal integer rows that are kept."""
EMPTY = "empty on both sides"
PERMUTED = "permuted: the same elements in another order"


class Wanted(NamedTuple):
    """What is asked of all pairs."""

    row_map: RowMap
    backward: bool
    """Whether there are gradients, whose floors depend on how large values are."""
    norms: frozenset[str]
    """Paths of the modules that divide each row by its size."""
    detail: "Callable[[str, Prepared], Detail] | None"
    """(site, pair) -> more measures; None where nobody asks for them."""


class Begun(Struct, frozen=True):
    """A pair whose values have to be read."""

    kind: Kind
    opened: Opened
    facts: Facts
    """What is known of it whatever comes of that."""
    known: Facts
    """What is known of it beside its values."""

    @property
    def like(self) -> Prepared:
        """It, or another of its form."""
        return self.opened.ready if self.opened.alike is None else self.kind.ready

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it."""
        found: tuple[str, ...] = self.known.get("notes") or self.facts["notes"]
        return found


class Row(NamedTuple):
    """What was found of a pair, as far as it is found of many at once."""

    numbers: Numbers
    spread: Spread
    worst: int
    """The row that is furthest off."""
    column: int
    """Of its largest difference."""
    rank: int | None
    """The rank that alone holds that."""
    mismatch: int
    """Its places where one side is not finite."""
    num_unequal: int


def rows_of(found: Pairs) -> list[Row]:
    """One a section."""
    worst, num_unequal = (found.seen.columns[name].tolist() for name in ("worst", "num_unequal"))
    numbers, spreads = numbers_of(found.seen, found.num_hashed), spreads_of(found.seen, found.widths)
    return list(map(Row, numbers, spreads, worst, *found.at_worst(), num_unequal))


def of_values(one: Begun, row: Row, found: Pairs, section: int, wanted: Wanted) -> Facts:
    """The members of :class:`Examined` that values give."""
    numbers, num_rows = row.numbers, found.num_rows(section)
    if not num_rows or not numbers.count:
        size = recorded_size(one.opened.ready) if wanted.backward else 0.0
        same: Facts = {"numbers": numbers, "spread": NOTHING, "size": size}
        return same | ({"basis": "hash"} if numbers.count else {"notes": (*one.notes, EMPTY)})
    like, parts = one.like, found.begun(section).parts
    column = None if row.mismatch else row.column
    part, rows = part_at(parts, row.worst), wanted.row_map
    steps = {like.right[each.join.target].records[0].key.step for each in parts}
    read: Facts = {
        "numbers": numbers,
        "basis": "values",
        "spread": row.spread,
        "worst": place_in(part, row.worst, column, row.rank, like, rows),
        "num_unequal": row.num_unequal,
    }
    if len(steps) == 1:
        (step,), error, odd = steps, row.spread.errors[-1], numbers.nonfinite_mismatch
        read["steps"] = (StepResult(step, num_rows, numbers.max_abs, numbers.rel_l2, error, odd),)
    else:
        errors = found.seen.errors_of(section)
        read["steps"] = steps_of(found[section], errors, like.right)
    if row.num_unequal or wanted.backward:
        read |= _closely(one, row, found, section, wanted)
    return read


def _closely(one: Begun, row: Row, found: Pairs, section: int, wanted: Wanted) -> Facts:
    """What some pairs alone are asked for, one by one."""
    site, like, read, exact = one.facts["site"], one.like, Facts(), one.kind.is_exact
    is_same_kind = like.left[0].dtype == like.right[0].dtype
    may_permute = row.num_unequal > 0 and is_same_kind and one.opened.may_be_permuted
    if may_permute or exact:
        measured = found[section]
        odd = np.flatnonzero(measured.rows.equal < measured.rows.width)
        read["unequal"] = tuple(measured.pairs[odd[:MAX_UNEQUAL]].tolist()) if exact else ()
        if may_permute and _is_permuted(measured, odd, one.opened.ready):
            read |= {"permuted": True, "notes": (PERMUTED, *one.notes)}
    is_keyed = like.layouts[0].keyed  # its columns are tokens
    spread = row.spread
    if row.num_unequal and found.num_rows(section) >= MIN_ROWS and not exact and not is_keyed and spread is not NOTHING:
        spread = with_channel(spread, worst_channel(one.opened, found[section]))
    if row.num_unequal and not exact and spread is not NOTHING:
        read |= _of_rows(one, found, section, spread, wanted.norms)
    if is_parameter(site):
        read["drifts"] = drifts(one.opened, found[section], found.seen[section])
        read["sways"] = sways(one.opened, found[section], found.seen[section])
    if wanted.backward:
        read["size"] = math.sqrt(found[section].rows.sum_sq_baseline.sum())
        if site.endswith(".grad") and spread is not NOTHING:
            spread = structs.replace(spread, sizes=sizes_of(found[section].rows))
    if wanted.detail is not None and row.num_unequal:
        read["detail"] = wanted.detail(site, one.opened.ready)
    return read | {"spread": spread}


def _of_rows(one: Begun, found: Pairs, section: int, spread: Spread, norms: frozenset[str]) -> Facts:
    """What the floors of a few kinds of sites depend on beside their errors."""
    read = Facts()
    if is_lifted(one.facts["site"], norms):
        read["own_errors"] = own_errors(found[section].rows)
    if one.like.layouts[0].keyed:
        read["sharpness"] = sharpness(one.opened, found[section])
    if stands_out(spread.errors):
        read["even_errors"] = even_errors(found[section].rows, spread.errors)
    return read


def _is_permuted(measured: Measured, odd: "np.ndarray[Any, Any]", ready: Prepared) -> bool:
    """Whether some firing whose rows ``odd`` are not equal has equal bags: rounding never gives the same elements."""
    parts = {id(part): part for part in map(measured.part_at, odd.tolist())}
    return any(ready.equal_by_bag(part.join) for part in parts.values())
