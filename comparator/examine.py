"""Examine: everything about one matched pair of sites that can be known without looking at other sites."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tapscope.comparator.channels import worst_channel
from tapscope.comparator.examined import Examined, are_exact
from tapscope.comparator.finding import RowCounts, Side
from tapscope.comparator.layout import Layout
from tapscope.comparator.match import Pair
from tapscope.comparator.measure import Measured, Opened, WidthError, measure
from tapscope.comparator.prepare import Prepared, Preparer
from tapscope.comparator.replicas import check_replicas
from tapscope.comparator.results import numbers_of, place_of, steps_of
from tapscope.comparator.series import Series, recorded
from tapscope.comparator.spread import NOTHING, Sizes, sizes_of, spread_of
from tapscope.comparator.suggest import Suggester
from tapscope.comparator.summaries import compare_stats, compare_values, unequal_hashes
from tapscope.dtypes import COMPLEX
from tapscope.errors import DataError
from tapscope.kernels.native import overview
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


class Look(NamedTuple):
    """A pair compared, before dims are suggested."""

    one: Examined
    ready: Prepared | None = None
    """None where there is nothing to suggest."""


@dataclass(slots=True)
class Examiner:
    """Compares pairs of one comparison."""

    preparer: Preparer
    tolerance: tuple[float, float] | None = None
    detail: bool = False
    """Whether unequal pairs are measured once more, see :mod:`.detail`."""
    _suggester: Suggester = field(init=False)

    def __post_init__(self) -> None:
        self._suggester = Suggester(self.preparer)

    def examine(self, pair: Pair) -> Examined:
        """Compare one pair; what cannot be compared says why, only a broken program raises."""
        return self.advised(self.look(pair))

    @np.errstate(all="ignore")  # as in compare(), for this may run in a thread of its own
    def look(self, pair: Pair) -> Look:
        """The greater part of :meth:`examine`, which several threads may do at once."""
        if pair.baseline is None or pair.target is None:
            series = pair.baseline or pair.target
            assert series is not None
            only = _side(series, series.first.shape)
            mine, other = (only, None) if pair.baseline else (None, only)
            notes = (pair.note,) if pair.note else ()
            return Look(Examined(pair=pair, site=series.site, baseline=mine, target=other, notes=notes))
        if pair.baseline.first.dtype is None or pair.target.first.dtype is None:
            return Look(_examine_values(pair, self.preparer.shift_steps))
        ready = self.preparer.prepare(pair)
        facts: _Facts = {
            "pair": pair,
            "site": pair.site or pair.baseline.site,
            "baseline": _side(pair.baseline, ready.left[0].shape),
            "target": _side(pair.target, ready.right[0].shape),
            "problem": ready.problem or _kinds(pair),
            "apart": ready.plan.apart,
            "layout": _weaker(ready.layouts),
            "missing": ready.num_broken + ready.plan.missing,
            "rows": ready.plan.counts,
            "notes": ready.notes,
            "warnings": ready.warnings,
        }
        if facts["problem"] or facts["apart"]:
            return Look(Examined(**facts), ready if ready.problem else None)
        try:
            facts |= self._compare(pair, ready)
        except WidthError as error:
            return Look(Examined(**facts | {"problem": str(error)}), ready)
        except DataError as error:
            facts["problem"] = str(error)
        return Look(Examined(**facts), None if facts["problem"] else ready)

    def advised(self, look: Look) -> Examined:
        """With the dims that would explain what could not be put together, where there are such; one pair after the
        other, for a suggestion depends on those before it."""
        one, ready = look
        if ready is None:
            return one
        if not one.problem:
            doubt = self._suggester.doubt(one.pair, ready, one.numbers.rel_l2 if one.numbers else 0.0)
            return replace(one, notes=(doubt, *one.notes)) if doubt else one
        broken = any(w.problem for w in (ready.left[0], ready.right[0]))
        advice = self._suggester.suggest(one.pair, broken=broken)
        return replace(one, problem=f"{one.problem}; {advice}" if advice else one.problem)

    def _compare(self, pair: Pair, ready: Prepared) -> _Facts:
        """The members of :class:`Examined` that comparing gives."""
        assert pair.baseline is not None
        assert pair.target is not None
        joins, used = ready.plan.joins, ready.used
        if not joins:
            return {"problem": _no_rows(ready.plan.counts)}
        replicas = check_replicas(used)
        notes = (*ready.notes, replicas.note) if replicas.note else ready.notes
        is_exact = are_exact(pair.baseline.first.dtype, pair.target.first.dtype)
        if not all(w.has_values for w in used) and not all(map(ready.equal_by_hash, joins)):
            found = _examine_stats(ready, notes, is_exact)
        else:
            found = self._measure(pair.site or pair.baseline.site, ready, notes, is_exact)
        return {"replicas": replicas.problem, **found}

    def _measure(self, site: str, ready: Prepared, notes: tuple[str, ...], is_exact: bool) -> _Facts:
        opened = Opened(ready)
        measured = measure(opened, self.tolerance or (0.0, 0.0))
        if not len(measured.rows):
            numbers = numbers_of(measured.total, measured.num_hashed)
            same: _Facts = {"numbers": numbers, "spread": NOTHING}
            return same | ({"basis": "hash"} if numbers.count else {"notes": (*notes, EMPTY)})
        seen = overview(measured.rows, measured.at_worst)
        numbers = numbers_of(seen.total, measured.num_hashed)
        if not numbers.count:
            return {"numbers": numbers, "spread": NOTHING, "notes": (*notes, EMPTY)}
        may_permute = seen.num_unequal > 0 and ready.left[0].dtype == ready.right[0].dtype
        odd = np.flatnonzero(measured.rows.equal < measured.rows.width) if may_permute or is_exact else _NONE
        permuted = may_permute and _is_permuted(measured, odd, ready)
        scans = seen.num_unequal and len(measured.rows) >= MIN_ROWS and not is_exact
        scans = scans and not ready.layouts[0].keyed  # its columns are tokens
        return {
            "numbers": numbers,
            "basis": "values",
            "spread": spread_of(seen, worst_channel(opened, measured) if scans else QUIET, _sizes(site, measured)),
            "worst": place_of(measured, seen.worst, ready, self.preparer.row_map),
            "steps": steps_of(measured, seen, ready.right),
            "unequal": tuple(measured.pairs[odd[:MAX_UNEQUAL]].tolist()) if is_exact else (),
            "num_unequal": seen.num_unequal,
            "permuted": permuted,
            "detail": self._detail(site, ready) if self.detail and seen.num_unequal else None,
            "notes": (PERMUTED, *notes) if permuted else notes,
        }

    def _detail(self, site: str, ready: Prepared) -> "Detail":
        from tapscope.comparator.detail import detail_of

        configs = [run.model_config for run in (self.preparer.baseline, self.preparer.target)]
        known = [int(k) for config in configs if (k := config.get("num_experts_per_tok"))]
        return detail_of(ready, site, known[0] if known else None)


def _kinds(pair: Pair) -> str:
    """What is wrong where one side alone is complex: their elements do not meet."""
    assert pair.baseline is not None
    assert pair.target is not None
    names = pair.baseline.first.dtype or "", pair.target.first.dtype or ""
    if (names[0] in COMPLEX) == (names[1] in COMPLEX):
        return ""
    return f"{names[0]} against {names[1]}: complex numbers do not meet real ones"


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


def _examine_values(pair: Pair, shift: int) -> Examined:
    """A pair of which at least one side is no tensor."""
    assert pair.baseline is not None
    assert pair.target is not None
    problem, compared, unequal = compare_values(pair.baseline, pair.target, shift)
    nowhere = not problem and not compared
    return Examined(
        pair=pair,
        site=pair.site or pair.baseline.site,
        baseline=_side(pair.baseline, pair.baseline.first.shape),
        target=_side(pair.target, pair.target.first.shape),
        problem=problem,
        apart="a plain value that changes, and no step number is in both runs" if nowhere else "",
        basis="value" if compared else "none",
        num_unequal=unequal,
    )


def _side(series: Series, shape: tuple[int, ...]) -> Side:
    first, sources = series.first, list(recorded(series)) if series.sources else [series]
    ranks = tuple(sorted({r.key.rank for f in series.firings for r in f.records}))
    return Side(sources[0].site, first.dtype, shape, sum(s.num_records for s in sources), first.dims, ranks)


def _weaker(layouts: tuple[Layout, Layout]) -> str:
    sources = {layout.source for layout in layouts}
    return next(s for s in ("inferred", "annotated", "whole") if s in sources)


def _no_rows(counts: RowCounts) -> str:
    reasons = [f"{n:,} {what}" for n, what in ((counts.forked, "forked"), (counts.unaligned, "unaligned")) if n]
    return f"no row in common here{': ' + ', '.join(reasons) if reasons else ''}"
