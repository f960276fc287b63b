"""Summaries: compare records without values to subtract, that is plain values and tensors kept as statistics only."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from msgspec import structs

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.pieces import is_partition, leaves
from tapscope.comparator.facts import Place, StepResult
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.error_distribution import NO_ERROR, QUANTILES, ErrorDistribution
from tapscope.comparator.pair_analysis.pair_result import PairMeta, PairResult, PairValues
from tapscope.comparator.runs.series import Series, side_of
from tapscope.run_format.record import Stats

_MAX_VALUE_LENGTH = 60
"""Maximum number of characters of a plain value shown in a note."""


def analyze_plain_values(pair: Pair, shift: int, rows: RowMap, *, is_same_mesh: bool) -> PairResult:
    """Return the result of a pair with a plain value on at least one side: typed JSON values, which must be equal.

    A value that never changes is compared once, whatever the steps. Otherwise, firings match by step and call, with
    target steps ``shift`` higher. Ranks are compared one by one if both runs have one mesh (``is_same_mesh``) and all
    ranks of a run hold the same token rows. If not, only the first rank is compared, with a warning if others differ. A
    number that equals the size of the step's own batch in both runs (Megatron's ``max_seq_len``) is excluded if it
    differs: the runs batch differently.
    """
    left, right = pair.sides
    about = PairMeta(baseline=side_of(left, left.first.shape), target=side_of(right, right.first.shape))
    one = PairResult(pair, pair.site or left.site, about)
    if (left.first.dtype is None) != (right.first.dtype is None):
        return one.replace(problem="a tensor on one side and a plain value on the other")
    by_rank = is_same_mesh and _have_same_ranks(left, right) and not _have_other_rows(pair, rows)
    matched = _matched(_values(left, 0, by_rank=by_rank), _values(right, shift, by_rank=by_rank))
    if not by_rank and not _have_other_rows(pair, rows):
        warnings = (
            _ranks_differ(series, name) for series, name in zip(pair.sides, ("baseline", "target"), strict=True)
        )
        one = structs.replace(one, meta=structs.replace(about, warnings=tuple(filter(None, warnings))))
    if not matched:
        return one.replace(exclusion_reason="a plain value that changes, and no step number is in both runs")
    unequal = [place for place, (mine, theirs) in matched.items() if mine != theirs]
    if not unequal:
        return structs.replace(one, values=PairValues(basis="value"))
    if _are_extents(pair, rows):
        mine, theirs = matched[unequal[0]]
        return one.replace(
            exclusion_reason=f"the size of the step's batch ({mine} against {theirs}): the runs batch differently"
        )
    steps = tuple(StepResult(step + shift, 0, 0.0, 0.0, 1.0) for step in dict.fromkeys(step for step, *_ in unequal))
    worst = Place(steps[0].step, steps[0].step - shift, rank=_lone_rank(unequal, matched))
    mine, theirs = map(_in_short, matched[unequal[0]])
    one = one.replace(notes=(f"a plain value differs: {mine} against {theirs}",))
    return structs.replace(one, values=PairValues(basis="value", num_unequal=len(unequal), steps=steps, worst=worst))


_ValuePlace = tuple[int, tuple[int, int], int]
"""(step, call, rank or -1 for all)."""
_Values = dict[_ValuePlace, str]
"""Place -> value as JSON."""


def _have_same_ranks(left: Series, right: Series) -> bool:
    ranks = [{record.key.rank for firing in series.firings for record in firing.records} for series in (left, right)]
    return ranks[0] == ranks[1]


def _have_other_rows(pair: Pair, rows: RowMap) -> bool:
    """Return whether ranks of a run hold different token rows (data or context parallel), so that their values may
    differ."""
    return any(
        len({id(side.of(record)) for record in firing.records}) > 1
        for series, side in zip(pair.sides, (rows.baseline, rows.target), strict=True)
        for firing in series.firings
    )


def _ranks_differ(series: Series, name: str) -> str:
    """Return a warning if the ranks of one firing hold different values; otherwise empty."""
    for firing in series.firings:
        values = {_written(record.value): record.key.rank for record in reversed(firing.records)}
        if len(values) > 1:
            examples = ", ".join(f"{_in_short(value)} on rank {rank}" for value, rank in list(values.items())[::-1][:2])
            return f"ranks of the {name} hold different values ({examples}); only the first rank's was compared"
    return ""


def _lone_rank(unequal: Sequence[_ValuePlace], matched: Mapping[_ValuePlace, object]) -> int | None:
    """Return the only rank whose values differ; None if there are several, or only one rank was compared."""
    ranks = {rank for _, _, rank in unequal}
    return ranks.pop() if len(ranks) == 1 < len({rank for _, _, rank in matched}) else None


def _matched(left: _Values, right: _Values) -> dict[_ValuePlace, tuple[str, str]]:
    """Return the matched values as (baseline, target), by the baseline's place."""
    if len(set(left.values())) == len(set(right.values())) == 1:
        place, value = next(iter(left.items()))
        return {place: (value, next(iter(right.values())))}
    return {place: (left[place], right[place]) for place in left if place in right}


def _are_extents(pair: Pair, rows: RowMap) -> bool:
    """Return whether every value in both runs is the size of the same axis of its step's token grid."""
    axes: set[tuple[int, int]] | None = None
    for series, side in zip(pair.sides, (rows.baseline, rows.target), strict=True):
        for firing in series.firings:
            grid, value = side.of(firing.records[0]), _written(firing.records[0].value)
            sizes = () if grid is None else grid.grid
            here = {(len(sizes), axis) for axis, size in enumerate(sizes) if str(size) == value}
            axes = here if axes is None else axes & here
            if not axes:
                return False
    return bool(axes)


def _in_short(value: str) -> str:
    return value if len(value) <= _MAX_VALUE_LENGTH else f"{value[: _MAX_VALUE_LENGTH - 1]}…"


def _values(series: Series, shift: int, *, by_rank: bool) -> _Values:
    if by_rank:
        return {(f.step - shift, f.call, r.key.rank): _written(r.value) for f in series.firings for r in f.records}
    return {(f.step - shift, f.call, -1): _written(f.records[0].value) for f in series.firings}


def _written(typed: Any) -> str:
    """Return a typed value as JSON text that is equal for equal values; 1 equals 1.0, which the recorder stores as a
    string."""
    if not isinstance(typed, Mapping) or "value" not in typed:
        return json.dumps(typed, sort_keys=True)
    value, rest = typed["value"], {key: each for key, each in typed.items() if key not in ("type", "value")}
    if typed.get("type") == "float":
        value = float(value)
        value = int(value) if value.is_integer() else value
    text = json.dumps(value, sort_keys=True)
    return f"{text} {json.dumps(rest, sort_keys=True)}" if rest else text


def compare_stats(ready: PreparedPair) -> tuple[str, ErrorDistribution]:
    """Return (problem, distribution) from statistics alone; the problem says so if a join does not cover both of its
    tensors.

    The typical error is the difference of the means relative to the rms. The error of the worst row is that of the
    largest magnitudes, and the gain is the ratio of the rms minus 1. Differences that leave all three unchanged are not
    detected.
    """
    differences: list[tuple[float, float, float]] = []
    for join in ready.plan.joins:
        one, two = ready.left[join.baseline], ready.right[join.target]
        covered = join.pairs is None or _are_alike(one, two, ready.layouts)
        covered = covered or all(
            _holds_only(whole, layout, 0 if join.pairs is None else len(join.pairs))
            for whole, layout in zip((one, two), ready.layouts, strict=True)
        )
        stats = _stats(one), _stats(two)
        if not covered or stats[0] is None or stats[1] is None or stats[0].count != stats[1].count:
            return "statistics only, over different rows: capture with keep=full to compare these", NO_ERROR
        differences.append(_differences(stats[0], stats[1]))
    mean, largest, gain = (max(column, key=abs) for column in zip(*differences, strict=True))
    if not (mean or largest or gain):
        return "", NO_ERROR
    errors = (abs(mean),) * (len(QUANTILES) - 1) + (max(abs(mean), abs(largest)),)
    return "", ErrorDistribution(1, errors, 0.0, gain, 0.0)


def unequal_hashes(ready: PreparedPair) -> tuple[int, bool]:
    """Return (number of joins with equal layout whose hashes differ, whether padding may be the only difference)."""
    odd, padded = 0, False
    for join in ready.plan.joins:
        one, two = ready.left[join.baseline], ready.right[join.target]
        alike = join.aligned and ready.layouts[0] == ready.layouts[1] and _are_alike(one, two, ready.layouts)
        if not alike or one.dtype != two.dtype or one.digest is None or two.digest is None:
            continue
        if len(one.digest) == len(two.digest) and one.digest != two.digest:
            odd += 1
            num_pairs = 0 if join.pairs is None else len(join.pairs)
            padded |= join.pairs is not None and not _holds_only(one, ready.layouts[0], num_pairs)
    return odd, padded


def _holds_only(whole: AssembledTensor, layout: Layout, num_pairs: int) -> bool:
    """Return whether the tensor holds exactly the compared rows, without padding."""
    count = 1
    for axis in layout.axes:
        count *= whole.shape[axis]
    return count == num_pairs and not layout.broadcast


def _are_alike(one: AssembledTensor, two: AssembledTensor, layouts: tuple[Layout, Layout]) -> bool:
    """Return whether both tensors hold the same grid in the same shape, so that statistics correspond, padding
    included."""
    return one.shape == two.shape and layouts[0].axes == layouts[1].axes


def _stats(whole: AssembledTensor) -> Stats | None:
    if whole.piece is None or not is_partition(whole.piece):  # statistics of partial sums do not add up
        return None
    parts = [record.stats for record in leaves(whole.piece)]
    known = [p for p in parts if p is not None]
    return reduce(Stats.merge, known) if len(known) == len(parts) else None


def _differences(one: Stats, two: Stats) -> tuple[float, float, float]:
    """Return the differences of (mean, largest magnitude, rms), each relative to the baseline."""
    if one.nonfinite != two.nonfinite:
        return math.inf, math.inf, 0.0
    if one.rms is None or two.rms is None or one.mean is None or two.mean is None:
        return 0.0, 0.0, 0.0  # no finite values
    if one.rms == 0.0:
        return (0.0, 0.0, 0.0) if two.rms == 0.0 else (math.inf, math.inf, 0.0)
    largest = (two.absmax or 0.0) / (one.absmax or math.inf) - 1.0
    return (two.mean - one.mean) / one.rms, largest, two.rms / one.rms - 1.0
