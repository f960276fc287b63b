"""Examine: everything about one matched pair of sites that can be known without looking at other sites."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.channels import worst_channel
from tapscope.comparator.examined import Examined, are_exact
from tapscope.comparator.finding import RowCounts
from tapscope.comparator.match import Pair
from tapscope.comparator.measure import Measured, Opened, WidthError, measure_all
from tapscope.comparator.prepare import Prepared, Preparer
from tapscope.comparator.replicas import check_replicas
from tapscope.comparator.results import numbers_of, place_of, recorded_size, steps_of
from tapscope.comparator.series import side_of
from tapscope.comparator.spread import NOTHING, Sizes, sizes_of, spread_of
from tapscope.comparator.suggest import Suggester
from tapscope.comparator.summaries import compare_stats, examine_values, unequal_hashes
from tapscope.comparator.updates import drifts, sways
from tapscope.dtypes import COMPLEX
from tapscope.errors import DataError
from tapscope.kernels.native import Overview
from tapscope.kernels.native.channels import MIN_ROWS, QUIET

if TYPE_CHECKING:
    from tapscope.comparator.detail import Detail

Array = np.ndarray[Any, Any]
_NONE = np.empty(0, np.int64)

MAX_UNEQUAL = 64
"""Unequal integer rows that are kept."""
EMPTY = "empty on both sides"
PERMUTED = "permuted: the same elements in another order"


_Facts = dict[str, Any]
"""Members of :class:`Examined`."""


class Look(Struct, frozen=True):
    """A pair compared, before dims are suggested."""

    one: Examined
    ready: Prepared | None = None
    """None where there is nothing to suggest."""


class _Begun(Struct, frozen=True):
    """A pair whose values have to be read."""

    ready: Prepared
    facts: _Facts
    """What is known of it whatever comes of that."""
    known: _Facts
    """What is known of it beside its values."""
    is_exact: bool


@dataclass(slots=True)
class Examiner:
    """Compares pairs of one comparison."""

    preparer: Preparer
    tolerance: tuple[float, float] | None = None
    detail: bool = False
    """Whether unequal pairs are measured once more, see :mod:`.detail`."""
    backward: bool = False
    """Whether there are gradients, whose floors depend on how large values are."""
    _suggester: Suggester = field(init=False)

    def __post_init__(self) -> None:
        self._suggester = Suggester(self.preparer)

    def examine(self, pair: Pair) -> Examined:
        """Compare one pair; what cannot be compared says why, only a broken program raises."""
        (look,) = self.look([pair])
        return self.advised(look)

    @np.errstate(all="ignore")  # as in compare(), for this may run in a thread of its own
    def look(self, pairs: Sequence[Pair]) -> list[Look]:
        """The greater part of :meth:`examine`, which several threads may do at once; of small pairs it takes less time
        when many are given."""
        begun = [self._begin(pair) for pair in pairs]
        opened = [Opened(one.ready) for one in begun if isinstance(one, _Begun)]
        found, seen = measure_all(opened, self.tolerance or (0.0, 0.0)) if opened else ([], [])
        rest = zip(opened, found, seen, strict=True)
        return [self._end(one, *next(rest)) if isinstance(one, _Begun) else one for one in begun]

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
        ready = self.preparer.prepare(pair)
        facts: _Facts = {
            "pair": pair,
            "site": pair.site or pair.baseline.site,
            "baseline": side_of(pair.baseline, ready.left[0].shape),
            "target": side_of(pair.target, ready.right[0].shape),
            "problem": ready.problem or _kinds(pair.baseline.first.dtype, pair.target.first.dtype),
            "apart": ready.plan.apart,
            "layout": _weaker(ready.layouts[0].source, ready.layouts[1].source),
            "missing": ready.num_broken + ready.plan.missing,
            "rows": ready.plan.counts,
            "notes": ready.notes,
            "warnings": ready.warnings,
        }
        if facts["problem"] or facts["apart"]:
            return Look(Examined(**facts), ready if ready.problem else None)
        try:
            return self._before_values(ready, facts)
        except DataError as error:
            return Look(Examined(**facts | {"problem": str(error)}))

    def _before_values(self, ready: Prepared, facts: _Facts) -> "Look | _Begun":
        if not ready.plan.joins:
            return Look(Examined(**facts | {"problem": _no_rows(ready.plan.counts)}))
        used, pair = ready.used, facts["pair"]
        replicas = check_replicas(used)
        known: _Facts = {"replicas": replicas.problem, "replica_place": replicas.place}
        known["notes"] = (*ready.notes, replicas.note) if replicas.note else ready.notes
        is_exact = are_exact(pair.baseline.first.dtype, pair.target.first.dtype)
        if all(whole.has_values for whole in used) or all(map(ready.equal_by_hash, ready.plan.joins)):
            return _Begun(ready, facts, known, is_exact)
        known |= _examine_stats(ready, known["notes"], is_exact)
        return Look(Examined(**facts | known), None if known.get("problem") else ready)

    def _end(self, begun: "_Begun", opened: Opened, found: Measured | WidthError | DataError, seen: Overview) -> Look:
        """A pair whose values were read."""
        ready, facts = begun.ready, begun.facts
        if isinstance(found, Exception):
            return Look(Examined(**facts | {"problem": str(found)}), ready if isinstance(found, WidthError) else None)
        try:
            read = self._read(begun, opened, found, seen)
        except DataError as error:
            return Look(Examined(**facts | {"problem": str(error)}))
        facts |= begun.known
        facts |= read
        return Look(Examined(**facts), ready)

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

    def _read(self, begun: "_Begun", opened: Opened, measured: Measured, seen: Overview) -> _Facts:
        """The members of :class:`Examined` that values give."""
        ready, site, notes = begun.ready, begun.facts["site"], begun.known["notes"]
        numbers, num_rows = numbers_of(seen.total, measured.num_hashed), len(measured.rows)
        if not num_rows or not numbers.count:
            size = recorded_size(ready) if self.backward else 0.0
            same: _Facts = {"numbers": numbers, "spread": NOTHING, "size": size}
            return same | ({"basis": "hash"} if numbers.count else {"notes": (*notes, EMPTY)})
        may_permute = seen.num_unequal > 0 and ready.left[0].dtype == ready.right[0].dtype
        odd = np.flatnonzero(measured.rows.equal < measured.rows.width) if may_permute or begun.is_exact else _NONE
        permuted = may_permute and _is_permuted(measured, odd, ready)
        scans = seen.num_unequal and num_rows >= MIN_ROWS and not begun.is_exact
        scans = scans and not ready.layouts[0].keyed  # its columns are tokens
        channel = worst_channel(opened, measured) if scans else QUIET
        return {
            "numbers": numbers,
            "basis": "values",
            "spread": spread_of(seen, channel, _sizes(site, measured), measured.width),
            "size": math.sqrt(measured.rows.sum_sq_baseline.sum()) if self.backward else 0.0,
            "drifts": drifts(opened, measured, seen),
            "sways": sways(opened, measured, seen),
            "worst": place_of(measured, seen.worst, ready, self.preparer.row_map),
            "steps": steps_of(measured, seen, ready.right),
            "unequal": tuple(measured.pairs[odd[:MAX_UNEQUAL]].tolist()) if begun.is_exact else (),
            "num_unequal": seen.num_unequal,
            "permuted": permuted,
            "detail": self.measure_detail(site, ready) if self.detail and seen.num_unequal else None,
            "notes": (PERMUTED, *notes) if permuted else notes,
        }

    def measure_detail(self, site: str, ready: Prepared) -> "Detail":
        """A pair with values on both sides once more, see :mod:`.detail`; raises DataError."""
        from tapscope.comparator.detail import detail_of

        configs = [run.model_config for run in (self.preparer.baseline, self.preparer.target)]
        known = [int(k) for config in configs if (k := config.get("num_experts_per_tok"))]
        return detail_of(ready, site, known[0] if known else None)


def _kinds(baseline: str, target: str) -> str:
    """What is wrong where one side alone is complex: their elements do not meet."""
    if (baseline in COMPLEX) == (target in COMPLEX):
        return ""
    return f"{baseline} against {target}: complex numbers do not meet real ones"


def _sizes(site: str, measured: Measured) -> Sizes | None:
    return sizes_of(measured.rows.sum_sq_baseline, measured.rows.width) if site.endswith(".grad") else None


def _is_permuted(measured: Measured, odd: Array, ready: Prepared) -> bool:
    """Whether some firing whose rows ``odd`` are not equal has equal bags: rounding never gives the same elements."""
    parts = {id(part): part for part in map(measured.part_at, odd.tolist())}
    return any(ready.equal_by_bag(part.join) for part in parts.values())


def _examine_stats(ready: Prepared, seen: tuple[str, ...], is_exact: bool) -> _Facts:
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


@lru_cache
def _weaker(*sources: str) -> str:
    return next(s for s in ("inferred", "annotated", "whole") if s in sources)


def _no_rows(counts: RowCounts) -> str:
    reasons = [f"{n:,} {what}" for n, what in ((counts.forked, "forked"), (counts.unaligned, "unaligned")) if n]
    return f"no row in common here{': ' + ', '.join(reasons) if reasons else ''}"
