"""Examine: everything about one matched pair of sites that can be known without looking at other sites."""

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.channels import worst_channel
from tapscope.comparator.examined import Examined
from tapscope.comparator.finding import Numbers, RowCounts, StepResult
from tapscope.comparator.joined_rows import part_at
from tapscope.comparator.kinds import Facts, Kind, kind_of
from tapscope.comparator.layout import is_parameter
from tapscope.comparator.lifts import even_errors, is_lifted, own_errors, stands_out
from tapscope.comparator.match import Pair
from tapscope.comparator.measure import Measured, Opened, Pairs, WidthError, measure_all
from tapscope.comparator.prepare import Prepared, Preparer
from tapscope.comparator.replicas import check_replicas
from tapscope.comparator.results import numbers_of, place_in, recorded_size, steps_of
from tapscope.comparator.series import side_of
from tapscope.comparator.sharpness import sharpness
from tapscope.comparator.spread import NOTHING, Spread, sizes_of, spreads_of, with_channel
from tapscope.comparator.suggest import Suggester
from tapscope.comparator.summaries import compare_stats, examine_values, unequal_hashes
from tapscope.comparator.updates import drifts, sways
from tapscope.errors import DataError
from tapscope.kernels.native.channels import MIN_ROWS

if TYPE_CHECKING:
    from tapscope.comparator.detail import Detail

Array = np.ndarray[Any, Any]

MAX_UNEQUAL = 64
"""Unequal integer rows that are kept."""
EMPTY = "empty on both sides"
PERMUTED = "permuted: the same elements in another order"


class Look(Struct, frozen=True):
    """A pair compared, before dims are suggested."""

    one: Examined
    ready: Prepared | None = None
    """None where there is nothing to suggest."""


class _Begun(Struct, frozen=True):
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


class _Row(NamedTuple):
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


class Examiner:
    """Compares pairs of one comparison."""

    def __init__(self, preparer: Preparer, tolerance: tuple[float, float] | None = None, detail: bool = False) -> None:
        """``detail``: whether unequal pairs are measured once more, see :mod:`.detail`."""
        self.preparer, self.tolerance, self.detail = preparer, tolerance, detail
        self.backward = False
        """Whether there are gradients, whose floors depend on how large values are."""
        self.norms: frozenset[str] = frozenset()
        """Paths of the modules that divide each row by its size."""
        self._suggester = Suggester(preparer)
        self._kinds: dict[Hashable, Kind] = {}
        """By the form of their pairs."""

    def examine(self, pair: Pair) -> Examined:
        """Compare one pair; what cannot be compared says why, only a broken program raises."""
        (look,) = self.look([pair])
        return self.advised(look)

    @np.errstate(all="ignore")  # as in compare(), for this may run in a thread of its own
    def look(self, pairs: Sequence[Pair]) -> list[Look]:
        """The greater part of :meth:`examine`, which several threads may do at once; of small pairs it takes less time
        when many are given."""
        begun = [self._begin(pair) for pair in pairs]
        waiting = [one for one in begun if isinstance(one, _Begun)]
        read = self._read(waiting) if waiting else iter(())
        return [next(read) if isinstance(one, _Begun) else one for one in begun]

    def _begin(self, pair: Pair) -> "Look | _Begun":
        """A pair as it is before its values are read, or with all that can be known where there is nothing to read."""
        if pair.baseline is None or pair.target is None:
            series = pair.baseline or pair.target
            assert series is not None
            only = side_of(series, series.first.shape)
            mine, other = (only, None) if pair.baseline else (None, only)
            notes = (pair.note,) if pair.note else ()
            return Look(Examined(pair=pair, site=series.site, baseline=mine, target=other, notes=notes))
        if pair.baseline.first.dtype is None or pair.target.first.dtype is None:
            return Look(examine_values(pair, self.preparer.shift_steps))
        form = self.preparer.form(pair)
        kind = self._kinds.get(form)
        if kind is not None and kind.alike is not None and kind.alike.fits(pair):
            later = partial(self.preparer.prepare, pair)
            return _Begun(kind, Opened(later, pair, kind.alike), kind.facts(pair), {})
        ready = self.preparer.prepare(pair)
        if kind is None:
            is_shared = self.preparer.like(form) is not None
            kind = kind_of(pair, ready, is_shared=is_shared)
            if is_shared:
                self._kinds[form] = kind
        facts = kind.facts(pair)
        if kind.problem or ready.plan.apart:
            return Look(Examined(**facts), ready if ready.problem else None)
        try:
            return self._before_values(kind, ready, facts)
        except DataError as error:
            return Look(Examined(**facts | {"problem": str(error)}))

    def _before_values(self, kind: Kind, ready: Prepared, facts: Facts) -> "Look | _Begun":
        if not ready.plan.joins:
            return Look(Examined(**facts | {"problem": _no_rows(ready.plan.counts)}))
        used = ready.used
        replicas = check_replicas(used)
        known: Facts = {"replicas": replicas.problem, "replica_place": replicas.place}
        known["notes"] = (*ready.notes, replicas.note) if replicas.note else ready.notes
        if all(whole.has_values for whole in used) or all(map(ready.equal_by_hash, ready.plan.joins)):
            return _Begun(kind, Opened(ready), facts, known)
        known |= _examine_stats(ready, known["notes"], kind.is_exact)
        return Look(Examined(**facts | known), None if known.get("problem") else ready)

    def _read(self, begun: Sequence[_Begun]) -> Iterator[Look]:
        """Pairs once their values were read."""
        found = measure_all([one.opened for one in begun], self.tolerance or (0.0, 0.0))
        worst, num_unequal = (found.seen.columns[name].tolist() for name in ("worst", "num_unequal"))
        numbers, spreads = numbers_of(found.seen, found.num_hashed), spreads_of(found.seen, found.widths)
        rows = list(map(_Row, numbers, spreads, worst, *found.at_worst(), num_unequal))
        for one, section in zip(begun, found.section, strict=True):
            ready = None if one.opened.alike else one.opened.ready
            problem = found.problem(section)
            if problem is not None:
                yield Look(Examined(**one.facts | {"problem": str(problem)}), ready if _is_width(problem) else None)
                continue
            try:
                read = self._of_values(one, rows[section], found, section)
            except DataError as error:
                yield Look(Examined(**one.facts | {"problem": str(error)}))
                continue
            yield Look(Examined(**{**one.facts, **one.known, **read}), ready)

    def advised(self, look: Look) -> Examined:
        """With the dims that would explain what could not be put together, where there are such; one pair after the
        other, for a suggestion depends on those before it."""
        one, ready = look.one, look.ready
        if ready is None:
            return one
        if not one.problem:
            doubt = self._suggester.doubt(one.pair, ready, one.numbers.rel_l2 if one.numbers else 0.0)
            return structs.replace(one, notes=(doubt, *one.notes)) if doubt else one
        broken = any(w.problem for w in (ready.left[0], ready.right[0]))
        advice = self._suggester.suggest(one.pair, broken=broken)
        return structs.replace(one, problem=f"{one.problem}; {advice}" if advice else one.problem)

    def _of_values(self, one: _Begun, row: _Row, found: Pairs, section: int) -> Facts:
        """The members of :class:`Examined` that values give."""
        numbers, num_rows = row.numbers, found.num_rows(section)
        if not num_rows or not numbers.count:
            size = recorded_size(one.opened.ready) if self.backward else 0.0
            same: Facts = {"numbers": numbers, "spread": NOTHING, "size": size}
            return same | ({"basis": "hash"} if numbers.count else {"notes": (*one.notes, EMPTY)})
        like, parts = one.like, found.begun(section).parts
        column = None if row.mismatch else row.column
        part, rows = part_at(parts, row.worst), self.preparer.row_map
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
        if row.num_unequal or self.backward:
            read |= self._closely(one, row, found, section)
        return read

    def _closely(self, one: _Begun, row: _Row, found: Pairs, section: int) -> Facts:
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
        if (
            row.num_unequal
            and found.num_rows(section) >= MIN_ROWS
            and not exact
            and not is_keyed
            and spread is not NOTHING
        ):
            spread = with_channel(spread, worst_channel(one.opened, found[section]))
        if row.num_unequal and not exact and spread is not NOTHING:
            read |= self._of_rows(one, found, section, spread)
        if is_parameter(site):
            read["drifts"] = drifts(one.opened, found[section], found.seen[section])
            read["sways"] = sways(one.opened, found[section], found.seen[section])
        if self.backward:
            squares = found[section].rows.sum_sq_baseline
            read["size"] = math.sqrt(squares.sum())
            if site.endswith(".grad") and spread is not NOTHING:
                spread = structs.replace(spread, sizes=sizes_of(squares, found[section].rows.width))
        if self.detail and row.num_unequal:
            read["detail"] = self.measure_detail(site, one.opened.ready)
        return read | {"spread": spread}

    def _of_rows(self, one: _Begun, found: Pairs, section: int, spread: Spread) -> Facts:
        """What the floors of a few kinds of sites depend on beside their errors."""
        read = Facts()
        if is_lifted(one.facts["site"], self.norms):
            read["own_errors"] = own_errors(found[section].rows)
        if one.like.layouts[0].keyed:
            read["sharpness"] = sharpness(one.opened, found[section])
        if stands_out(spread.errors):
            read["even_errors"] = even_errors(found[section].rows, spread.errors)
        return read

    def measure_detail(self, site: str, ready: Prepared) -> "Detail":
        """A pair with values on both sides once more, see :mod:`.detail`; raises DataError."""
        from tapscope.comparator.detail import detail_of

        configs = [run.model_config for run in (self.preparer.baseline, self.preparer.target)]
        known = [int(k) for config in configs if (k := config.get("num_experts_per_tok"))]
        return detail_of(ready, site, known[0] if known else None)


def _is_width(problem: Exception) -> bool:
    """Whether other dims may help."""
    return isinstance(problem, WidthError)


def _is_permuted(measured: Measured, odd: Array, ready: Prepared) -> bool:
    """Whether some firing whose rows ``odd`` are not equal has equal bags: rounding never gives the same elements."""
    parts = {id(part): part for part in map(measured.part_at, odd.tolist())}
    return any(ready.equal_by_bag(part.join) for part in parts.values())


def _examine_stats(ready: Prepared, seen: tuple[str, ...], is_exact: bool) -> Facts:
    problem, spread = compare_stats(ready)
    num_unequal, padded = unequal_hashes(ready)
    if num_unequal and padded and is_exact and not problem:
        problem = "the hashes differ, maybe in the padding alone: capture with keep=full to compare these"
    if problem:
        return {"problem": problem, "notes": seen}
    odd = [join for join in ready.plan.joins if ready.unequal_by_hash(join)]
    permuted = bool(num_unequal) and any(map(ready.equal_by_bag, odd))
    notes = [PERMUTED] if permuted else ["the hashes differ, the statistics do not"] * (num_unequal and spread.is_zero)
    notes.append("only statistics were kept: what leaves mean, rms and maximum alone is not seen")
    return {
        "basis": "stats",
        "spread": spread,
        "num_unequal": num_unequal,
        "permuted": permuted,
        "notes": (*notes, *seen),
    }


def _no_rows(counts: RowCounts) -> str:
    reasons = [f"{n:,} {what}" for n, what in ((counts.forked, "forked"), (counts.unaligned, "unaligned")) if n]
    return f"no row in common here{': ' + ', '.join(reasons) if reasons else ''}"
