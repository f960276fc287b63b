"""Examined: everything about one matched pair of sites that can be known without looking at other sites."""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct

from tapscope import dtypes
from tapscope.comparator.finding import Numbers, Place, RowCounts, Side, StepResult
from tapscope.comparator.match import Pair
from tapscope.comparator.measure import are_masks
from tapscope.comparator.spread import Drift, Quantiles, Spread

if TYPE_CHECKING:
    from tapscope.comparator.detail import Detail


class Examined(Struct, frozen=True, kw_only=True):
    """One site before it is judged."""

    pair: Pair
    site: str
    baseline: Side | None = None
    target: Side | None = None
    problem: str = ""
    """Why it could not be compared; everything below is then empty."""
    apart: str = ""
    """Why nothing of it meets though nothing is wrong: it is left out of the findings."""
    basis: str = "none"
    layout: str = "whole"
    rows: RowCounts = RowCounts()
    missing: int = 0
    """Firings without a partner that nobody explained."""
    spread: Spread | None = None
    """None for what was not compared as numbers."""
    handed_on: Spread | None = None
    """The spread of all rows where some were set aside (:mod:`.set_aside`): that is what goes into what follows."""
    size: float = 0.0
    """Norm of the baseline's rows that were read; 0 where none was."""
    own_errors: Quantiles = ()
    """Errors of the rows that a norm is given, each relative to itself (:mod:`.lifts`); empty for anything else."""
    sharpness: Quantiles = ()
    """Condition of attention weights (:mod:`.sharpness`); empty for anything else."""
    even_errors: Quantiles = ()
    """Errors of the rows, each relative to the typical one at least, where some stand out; else empty."""
    drifts: tuple[Drift, ...] = ()
    """Of a parameter that an optimizer moved, step by step; see :mod:`.updates`."""
    sways: Mapping[int, Quantiles] = {}
    """Step -> what errors of a parameter's gradient turn of an update; empty for anything else."""
    numbers: Numbers | None = None
    worst: Place | None = None
    steps: tuple[StepResult, ...] = ()
    unequal: tuple[int, ...] = ()
    """Row pairs whose integers differ, the first few; -1 where there are no token rows."""
    num_unequal: int = 0
    """Rows that are not equal bit for bit as numbers; where only statistics were kept, firings whose hashes differ."""
    permuted: bool = False
    """Whether somewhere unequal tensors hold the same elements, in another order."""
    detail: "Detail | None" = None
    replicas: str = ""
    """What is wrong with the replicas of one side, if anything."""
    replica_place: Place | None = None
    """Where that is."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Of the notes, those that say why values may be wrong."""

    @property
    def is_exact(self) -> bool:
        """Whether values of this kind must be equal: integers, booleans, values that are no tensors."""
        if self.baseline is None or self.target is None:
            return False
        return are_exact(self.baseline.dtype, self.target.dtype)


@lru_cache
def are_exact(baseline: str | None, target: str | None) -> bool:
    """Whether values of these types must be equal, see :attr:`Examined.is_exact`."""
    return are_masks(baseline, target) or not (dtypes.is_float(baseline) or dtypes.is_float(target))
