"""Kinds: what of examining a pair is the same for all pairs of its form."""

from functools import lru_cache
from typing import Any

from msgspec import Struct

from tapscope.comparator.alike import Alike
from tapscope.comparator.examined import are_exact
from tapscope.comparator.finding import Side
from tapscope.comparator.match import Pair
from tapscope.comparator.measure import alike
from tapscope.comparator.prepare import Prepared
from tapscope.comparator.series import side_of
from tapscope.dtypes import COMPLEX

Facts = dict[str, Any]
"""Members of :class:`~.examined.Examined`."""


class Kind(Struct, frozen=True):
    """A pair that was prepared, for others of its form."""

    pair: Pair
    ready: Prepared
    sides: tuple[Side, Side]
    problem: str
    """Why it cannot be compared."""
    layout: str
    is_exact: bool
    alike: Alike | None
    """How pairs of the form are read together; None where each is prepared and read by itself."""

    def facts(self, pair: Pair) -> Facts:
        """What is known of a pair of the kind before its values are read."""
        assert pair.baseline is not None
        assert pair.target is not None
        sides, known = self.sides, self.ready
        if pair is not self.pair:
            sides = _named(sides[0], pair.baseline.site), _named(sides[1], pair.target.site)
        return {
            "pair": pair,
            "site": pair.site or pair.baseline.site,
            "baseline": sides[0],
            "target": sides[1],
            "problem": self.problem,
            "apart": known.plan.apart,
            "layout": self.layout,
            "missing": known.num_broken + known.plan.missing,
            "rows": known.plan.counts,
            "notes": known.notes,
            "warnings": known.warnings,
        }


def kind_of(pair: Pair, ready: Prepared, *, is_shared: bool) -> Kind:
    """The kind of a pair that was prepared; ``is_shared``: whether others may be of it."""
    assert pair.baseline is not None
    assert pair.target is not None
    names = pair.baseline.first.dtype or "", pair.target.first.dtype or ""
    sides = side_of(pair.baseline, ready.left[0].shape), side_of(pair.target, ready.right[0].shape)
    problem = ready.problem or _unlike(*names)
    layout = _weaker(ready.layouts[0].source, ready.layouts[1].source)
    together = alike(ready) if is_shared and not problem and not ready.plan.apart else None
    return Kind(pair, ready, sides, problem, layout, are_exact(*names), together)


def _named(side: Side, site: str) -> Side:
    return Side(site, side.dtype, side.shape, side.num_records, side.dims, side.ranks, side.parts)


def _unlike(baseline: str, target: str) -> str:
    """What is wrong where one side alone is complex: their elements do not meet."""
    if (baseline in COMPLEX) == (target in COMPLEX):
        return ""
    return f"{baseline} against {target}: complex numbers do not meet real ones"


@lru_cache
def _weaker(*sources: str) -> str:
    return next(s for s in ("inferred", "annotated", "whole") if s in sources)
