"""Replicas: check that values declared equal on several ranks are equal up to the rounding of their dtype."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import blocks
from tapscope.comparator.assembly.pieces import Piece, leaves
from tapscope.comparator.facts import Place
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.joined_rows import compare_blocks
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import WidthError, measure
from tapscope.comparator.runs.firings import Firing
from tapscope.comparator.runs.series import Series
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.kernels.native import RowMeasures

TOLERANCE_EPS = 2.0
"""Tolerance for the error of a replica's row relative to its norm, in epsilons of the dtype.

An all-reduce may add in a different order on every rank, and each order rounds by up to one epsilon.
"""
TOLERANCE_GAIN = 0.25
"""Tolerance for a common factor, in epsilons: rounding goes both ways and averages out over many elements."""


MAX_REPLICA_ERROR = 0.05
"""Maximum relative error at which an undeclared rank still counts as a replica; partial sums are much further from
their total."""
MAX_RIGHT_SHARE = 0.25
"""A replica is correct if its distance from the other run is below this fraction of the largest distance."""


class Replicas(NamedTuple):
    """Result of checking the replicas of some tensors; ``problem`` and ``note`` are empty if all are equal."""

    problem: str = ""
    """One sentence on the first replicas that differ by more than rounding."""
    note: str = ""
    """One sentence on the first replicas that differ by rounding only."""
    place: Place | None = None
    """Place where the first unequal replicas differ most: row (along the first axis), column, and the rank that is not
    the first of its group."""

    whole: AssembledTensor | None = None
    """The tensor with the problem."""


class _Distance(NamedTuple):
    """Distance between two replicas."""

    row: float
    """Largest error of a row; inf if non-finite values differ."""
    gain: float = 0.0
    """Common factor of the two replicas minus 1, estimated over many elements."""
    at: tuple[int, ...] = ()
    """(row, column) of the largest error, if values were compared."""


def check_replicas(wholes: Iterable[AssembledTensor]) -> Replicas:
    """Compare every replica with the first of its group."""
    note = ""
    for whole in wholes:
        for first, other, axis in whole.replicas:
            eps = dtypes.epsilon(whole.dtype or "")
            ranks = ", ".join(str(r.key.rank) for piece in (first, other) for r in leaves(piece))
            where = f"ranks {ranks} at step {whole.records[0].key.step}"
            if first.shape != other.shape:
                shapes = f"{tuple(first.shape)} and {tuple(other.shape)}"
                problem = f"{where} have shapes {shapes}"
                problem = f"replicas over {axis} differ in {whole.run.name}: {problem}"
                return Replicas(problem, note, _place(other, ()), whole)
            apart = _distance(whole, first, other)
            if how := _problem(apart, eps):
                problem = f"replicas over {axis} differ in {whole.run.name}: {where} {how}"
                return Replicas(problem, note, _place(other, apart.at), whole)
            if apart.row and not note:
                note = (
                    f"replicas over {axis} differ by rounding: {where} differ by {apart.row:.1e} relative to their norm"
                )
    return Replicas("", note)


def with_replicas(pair: Pair) -> Pair:
    """Return the pair with the ranks of one run treated as replicas, because the other run's ranks hold equal values.

    Applies to pairs without dims if exactly one run has equal values on all ranks in every firing; otherwise unchanged.
    """
    baseline, target = sides = pair.sides
    if any(one.derivation is not None or one.first.dims is not None for one in sides):
        return pair
    ranks = [{record.key.rank for record in one.firings[0].records} for one in sides]
    agree = [all(_agree(firing) for firing in one.firings) for one in sides]
    if ranks[0] != ranks[1] or len(ranks[0]) < 2 or agree[0] == agree[1]:
        return pair
    if agree[0]:
        return structs.replace(pair, target=_replicated(target))
    return structs.replace(pair, baseline=_replicated(baseline))


def against_one_rank(pair: Pair) -> Pair:
    """Return the pair with the ranks of one run treated as replicas of the other run's only rank.

    Unchanged if shapes differ or there are dims. :func:`has_right_rank` then checks that the assumption holds.
    """
    baseline, target = sides = pair.sides
    if any(one.derivation is not None or one.first.dims is not None for one in sides):
        return pair
    few, many = sorted(sides, key=lambda one: len(one.firings[0].records))
    shapes = {record.shape for one in sides for firing in one.firings for record in firing.records}
    if len(shapes) > 1 or {len(firing.records) for firing in few.firings} != {1} or len(many.firings[0].records) < 2:
        return pair
    if many is target:
        return structs.replace(pair, target=_replicated(target))
    return structs.replace(pair, baseline=_replicated(baseline))


def has_right_rank(ready: PreparedPair) -> bool:
    """Return whether a rank agrees with the other run while other ranks differ from it by far more.

    Pipeline stages are not replicas: their modules differ although names are equal.
    """
    if ready.problem or not ready.plan.joins or not all(whole.has_values for whole in ready.joined_firings):
        return False
    try:
        wrong = check_replicas(ready.joined_firings).whole
        if wrong is None or len({wrong.run.coords(record.key.rank).get("pp") for record in wrong.records}) > 1:
            return False
        return bool(contradicted_ranks(ready, wrong, MAX_REPLICA_ERROR))
    except DataError:
        return False


def stacked_by_rank(pair: Pair) -> Pair:
    """Return the pair with each rank compared to the same rank of the other run; unchanged if ranks or shapes differ,
    or there are dims."""
    baseline, target = sides = pair.sides
    if any(one.derivation is not None or one.first.dims is not None for one in sides):
        return pair
    held = [[sorted((r.key.rank, r.shape) for r in firing.records) for firing in one.firings] for one in sides]
    if held[0] != held[1] or any(len(ranks) < 2 for ranks in held[0]):
        return pair
    if any(len({(len(shape), shape[1:]) for _, shape in ranks}) > 1 for ranks in held[0]):
        return pair
    return structs.replace(pair, baseline=_stacked(baseline), target=_stacked(target))


def _stacked(series: Series) -> Series:
    return structs.replace(series, firings=[structs.replace(f, is_stacked=True) for f in series.firings])


def _replicated(series: Series) -> Series:
    return structs.replace(series, firings=[structs.replace(f, is_replicated=True) for f in series.firings])


def _agree(firing: Firing) -> bool:
    first = firing.records[0]
    return first.hash is not None and all((r.hash, r.shape) == (first.hash, first.shape) for r in firing.records)


def contradicted_ranks(ready: PreparedPair, whole: AssembledTensor, agrees: float = math.inf) -> list[int]:
    """Return the ranks whose replicas differ from the other run while replicas of other ranks agree with it.

    ``agrees`` is the largest relative error that counts as agreement. Empty if no rank or all ranks differ, or without
    values. Raises DataError if bytes cannot be read.
    """
    side = 0 if any(whole is one for one in ready.left) else 1
    at = next(i for i, one in enumerate((ready.left, ready.right)[side]) if one is whole)
    joins = tuple(j for j in ready.plan.joins if (j.target if side else j.baseline) == at)
    others = [other for _, other, _ in whole.replicas]
    listed = {r.key.rank for piece in others for r in leaves(piece)}
    firsts = [r.key.rank for r in whole.records if r.key.rank not in listed]
    errors = [(firsts, _error(ready, whole, whole.piece, side, at, joins))]
    errors += [([r.key.rank for r in leaves(other)], _error(ready, whole, other, side, at, joins)) for other in others]
    least, largest = min(error for _, error in errors), max(error for _, error in errors)
    if not least <= min(MAX_RIGHT_SHARE * largest, agrees):
        return []
    return sorted(
        rank for ranks, error in errors if not error <= max(MAX_RIGHT_SHARE * largest, least) for rank in ranks
    )


def _error(
    ready: PreparedPair, whole: AssembledTensor, piece: Piece | None, side: int, at: int, joins: tuple[RowJoin, ...]
) -> float:
    """Return the relative error of the pair if ``whole`` consisted of this piece."""
    instead = structs.replace(whole, piece=piece, replicas=())
    sides = [list(ready.left), list(ready.right)]
    sides[side][at] = instead
    plan = structs.replace(ready.plan, joins=joins)
    one = structs.replace(ready, left=tuple(sides[0]), right=tuple(sides[1]), plan=plan)
    if not joins or not all(w.has_values for w in one.joined_firings):
        return math.nan
    try:
        return measure(LazyPair(one)).total.rel_l2
    except WidthError:
        return math.inf


def _problem(apart: _Distance, eps: float) -> str:
    """Return a description of a difference beyond the rounding of ``eps``; empty if there is none."""
    if apart.row > TOLERANCE_EPS * eps:
        return "are not equal" if math.isinf(apart.row) else f"differ by {apart.row:.1e} relative to their norm"
    if abs(apart.gain) > TOLERANCE_GAIN * eps:
        return f"differ by a common factor, 1 {'+' if apart.gain > 0 else '-'} {abs(apart.gain):.1e}"
    return ""


def _place(other: Piece, at: tuple[int, ...]) -> Place:
    keys = [record.key for record in leaves(other)]
    rank = keys[0].rank if len(keys) == 1 else None
    return Place(keys[0].step, keys[0].step, index=at, rank=rank)


def _distance(whole: AssembledTensor, first: Piece, other: Piece) -> _Distance:
    """Return the distance between two replicas; with statistics only, compare largest magnitudes and root mean
    squares."""
    if any(r.entry is None for piece in (first, other) for r in leaves(piece)):
        one, two = (next(leaves(piece)).stats for piece in (first, other))
        if one is None or two is None or one.nonfinite != two.nonfinite:
            return _Distance(math.inf)  # only the unequal hashes are known
        return _Distance(abs(_ratio(two.absmax, one.absmax)), _ratio(two.rms, one.rms))
    axes = (0,) if len(first.shape) > 1 else ()
    rows = compare_blocks(blocks(first, whole.run, axes), blocks(other, whole.run, axes), RowJoin(0, 0))
    if rows.nonfinite_mismatch.any():
        row = int(np.argmax(rows.nonfinite_mismatch > 0))
        return _Distance(math.inf, at=(row,))
    if not rows.sum_sq_diff.any():
        return _Distance(0.0)
    errors = _row_errors(rows)
    row = int(np.nanargmax(errors))
    return _Distance(float(errors[row]), _gain(rows), (row, int(rows.argmax[row])))


def _ratio(one: float | None, two: float | None) -> float:
    if not one or not two:
        return 0.0 if bool(one) == bool(two) else math.inf
    return one / two - 1.0


def _row_errors(rows: RowMeasures) -> np.ndarray[Any, Any]:
    scale = np.maximum(rows.sum_sq_baseline, np.median(rows.sum_sq_baseline))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(rows.sum_sq_diff / scale))


def _gain(rows: RowMeasures) -> float:
    size = float(rows.sum_sq_baseline.sum())
    if int(rows.width.sum()) < 64 or not 0.0 < size < math.inf:
        return 0.0
    return float(rows.dot.sum()) / size - 1.0
