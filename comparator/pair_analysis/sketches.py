"""Sketches: estimate the difference of two tensors of which at least one was kept as a sketch.

Sketches are linear: sketches of shards, partial sums and data-parallel ranks are added, and so are those of steps,
until both sides hold the same token rows. A side that kept values is sketched here.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.alignment.row_map import FORKED
from tapscope.comparator.facts import StepResult
from tapscope.comparator.metrics.error_distribution import NO_ERROR, QUANTILES, ErrorDistribution
from tapscope.comparator.pair_analysis.pair_result import PairResult, PairValues
from tapscope.comparator.runs.firings import Firing
from tapscope.comparator.runs.mesh_coords import MeshCoords
from tapscope.comparator.runs.series import Series
from tapscope.core.dims import parse
from tapscope.core.errors import DataError, DimsError
from tapscope.core.formatting import number
from tapscope.core.site import is_parameter, port_of
from tapscope.kernels.native.sketch import can_sketch, sketch_of
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run
from tapscope.run_format.sketch import (
    COUNTERS,
    HIGH_FACTOR,
    LOW_FACTOR,
    RowKeys,
    SketchIndex,
    estimate,
    row_keys,
    sketch_index,
)

Array = np.ndarray[Any, Any]

BASIS = "sketch"
"""Basis of a result that is estimated from sketches."""


class _Problem(Exception):
    """Sketches cannot be compared; the message is a sentence that says why."""


class _Unit(NamedTuple):
    """The sketch of one firing on one side."""

    step: int
    call: tuple[int, int]
    keys: Array | None
    """[rows] uint32: sorted keys of its token rows; None if they are unknown."""
    shape: tuple[int, ...]
    counters: Array
    num_nonfinite: int
    num_elements: int
    is_forked: bool


def has_sketches(*series: Series | None) -> bool:
    """Return whether any record in the first firings of these series has a sketch."""
    return any(
        record.sketch is not None
        for one in series
        if one is not None and not one.sources
        for firing in one.firings[:1]
        for record in firing.records
    )


def compare_sketches(one: PairResult, preparer: PairPreparer) -> PairResult | str:
    """Return the result of a pair of which at least one side was kept as sketches, or a sentence on why there is
    none."""
    baseline, target = one.pair.baseline, one.pair.target
    assert baseline is not None
    assert target is not None
    if baseline.sources or target.sources:
        return "sketches cannot be split or joined, which this match requires"
    reader = _Reader(is_parameter(one.site))
    try:
        sides = (
            reader.units(preparer.baseline, preparer.mesh_coords[0], preparer.row_map.baseline, baseline.firings),
            reader.units(preparer.target, preparer.mesh_coords[1], preparer.row_map.target, target.firings),
        )
        groups = list(_groups(sides, preparer.shift_steps))
    except (_Problem, DataError) as error:
        return str(error)
    if not groups:
        return "sketches need steps with the same request names and token rows in both runs, and there are none"
    result = _result(one, groups, len(sides[1]) - sum(len(right) for _, right in groups))
    if one.is_exact and result.num_unequal and not port_of(one.site).startswith("in["):
        reason = "integers differ, and only values show whether near ties explain it: capture with keep=full"
        return one.replace(exclusion_reason=reason)
    return result


_Group = tuple[list[_Unit], list[_Unit]]


def _result(one: PairResult, groups: Sequence[_Group], num_left_out: int) -> PairResult:
    squares, steps, errors, num_unequal = [0.0, 0.0], list[StepResult](), list[float](), 0
    num_nonfinite = num_rows = 0
    for left, right in groups:
        a, b = (np.sum([unit.counters.astype(np.float64) for unit in side], 0) for side in (left, right))
        if sum(unit.num_elements for unit in left) == sum(unit.num_elements for unit in right):
            num_nonfinite += abs(sum(u.num_nonfinite for u in left) - sum(u.num_nonfinite for u in right))
        estimated = estimate(a, b)
        rows = sum(1 if unit.keys is None else len(unit.keys) for unit in right)
        num_rows += rows
        errors.append(estimated.error)
        if estimated.error:
            num_unequal += rows
            squares[0] += float((b - a) @ (b - a))
            steps.append(StepResult(right[0].step, rows, 0.0, estimated.error, estimated.error))
        squares[1] += float(a @ a)
    if num_nonfinite:
        spread = ErrorDistribution(num_rows, (float("inf"),) * len(QUANTILES), 0.0, 0.0, 0.0)
        note = f"{num_nonfinite:,} values are not finite in one run only"
    elif not num_unequal:
        spread = NO_ERROR
        note = "estimated from sketches: equal up to the rounding of their counters"
    else:
        quantiles = tuple(np.quantile(errors, QUANTILES).tolist())
        spread = ErrorDistribution(len(groups), quantiles, 0.0, 0.0, 0.0)
        error = float(np.sqrt(squares[0] / squares[1])) if squares[1] else float("inf")
        note = (
            f"estimated from sketches: relative error {number(error)} "
            f"(95 % interval {number(error * LOW_FACTOR)} to {number(error * HIGH_FACTOR)})"
        )
    notes = [note]
    if num_left_out:
        why = "no firings of the baseline have the same token rows"
        notes.append(f"{num_left_out:,} firings of the target not compared: {why}")
    steps.sort(key=lambda result: result.step)
    values = PairValues(basis=BASIS, distribution=spread, num_unequal=num_unequal, steps=tuple(steps))
    return structs.replace(one.replace(notes=(*notes, *one.notes)), values=values)


def _groups(sides: tuple[list[_Unit], list[_Unit]], shift: int) -> Iterable[_Group]:
    """Yield groups of units of both sides with the same rows.

    A group is one unit per side where steps correspond, otherwise several units whose rows add up.
    """
    plain = [[unit for unit in side if unit.keys is None] for side in sides]
    there = {(unit.step, unit.call): unit for unit in plain[1]}
    for unit in plain[0]:
        partner = there.get((unit.step + shift, unit.call))
        if partner is not None and partner.shape == unit.shape:
            yield [unit], [partner]
    left, right = ([unit for unit in side if unit.keys is not None] for side in sides)
    waiting: dict[bytes, list[_Unit]] = {}
    for unit in right:
        waiting.setdefault(_name(unit), []).append(unit)
    rest = []
    for unit in left:
        same = waiting.get(_name(unit))
        if same:
            partner = same.pop(0)
            if not (unit.is_forked or partner.is_forked):
                yield [unit], [partner]
        else:
            rest.append(unit)
    others = [unit for same in waiting.values() for unit in same]
    yield from _components(rest, others)


def _name(unit: _Unit) -> bytes:
    assert unit.keys is not None
    return unit.keys.tobytes()


def _components(left: list[_Unit], right: list[_Unit]) -> Iterable[_Group]:
    """Yield the smallest groups of units that share rows, if both sides hold each row equally often."""
    units = [*left, *right]
    parents = list(range(len(units)))

    def root(at: int) -> int:
        while parents[at] != at:
            parents[at] = at = parents[parents[at]]
        return at

    owner: dict[int, int] = {}
    for at, unit in enumerate(units):
        assert unit.keys is not None
        for key in unit.keys.tolist():
            parents[root(at)] = root(owner.setdefault(key, at))
    groups: dict[int, _Group] = {}
    for at, unit in enumerate(units):
        groups.setdefault(root(at), ([], []))[at >= len(left)].append(unit)
    for mine, theirs in groups.values():
        if not (mine and theirs) or any(unit.is_forked for unit in (*mine, *theirs)):
            continue
        one, two = (np.sort(np.concatenate([unit.keys for unit in side])) for side in (mine, theirs))
        if np.array_equal(one, two):
            yield mine, theirs


class _Reader:
    """Reads the sketches of a site, computing them where a run kept values."""

    def __init__(self, is_param: bool) -> None:
        self._is_param = is_param
        self._keys: dict[tuple[int, int, int], RowKeys | None] = {}
        self._indices: dict[tuple[Any, ...], SketchIndex | str] = {}

    def units(self, run: Run, mesh: MeshCoords, rows: Any, firings: Sequence[Firing]) -> list[_Unit]:
        """Return one unit per firing. Raises _Problem or DataError."""
        return [self._unit(run, mesh, rows, firing) for firing in firings]

    def _unit(self, run: Run, mesh: MeshCoords, rows: Any, firing: Firing) -> _Unit:
        held: dict[tuple[Any, ...], Record] = {}
        total, keys, nonfinite, count, is_forked, by_rows = np.zeros(COUNTERS), list[Array](), 0, 0, False, None
        for record in firing.records:
            index = self._index(run, mesh, record)
            here = index.keys.tobytes() if index.by_rows else b""
            place = (*_place(record, mesh), here)
            if (same := held.get(place)) is not None:
                if same.hash != record.hash and record.dims is None:
                    raise _Problem("its ranks hold different values, and no dims declare how it is sharded")
                continue
            held[place] = record
            if by_rows is not None and by_rows != index.by_rows:
                raise _Problem("its token rows are known on some ranks only")
            by_rows = index.by_rows
            total += self._counters(run, record, index)
            if record.stats is not None:
                nonfinite, count = nonfinite + record.stats.nonfinite, count + record.stats.count
            if index.by_rows:
                keys.append(index.keys)
                row_table = rows.of(record)
                is_forked = is_forked or (row_table is not None and bool((row_table.pairs == FORKED).any()))
        known = np.sort(np.unique(np.concatenate(keys))) if by_rows and keys else None
        return _Unit(firing.step, firing.call, known, firing.records[0].shape, total, nonfinite, count, is_forked)

    def _index(self, run: Run, mesh: MeshCoords, record: Record) -> SketchIndex:
        at = id(run), record.key.step, record.key.rank
        if at not in self._keys:
            line = run.steps.get(record.key.step, {}).get(record.key.rank)
            self._keys[at] = None if line is None or self._is_param else row_keys(line.info)
        known = (*at, record.shape, record.dims, record.rows)
        sketch_index_of = self._indices.get(known)
        if sketch_index_of is None:
            sketch_index_of = self._indices[known] = sketch_index(
                record.shape,
                self._keys[at],
                dims=record.dims,
                slots=record.rows,
                mesh=mesh.sizes,
                coords=mesh.coords.get(record.key.rank, {}),
            )
        if not isinstance(sketch_index_of, SketchIndex):
            raise _Problem(sketch_index_of)
        if record.sketch is not None and record.sketch.by_rows != sketch_index_of.by_rows:
            raise _Problem("its sketches were computed with other token rows than those of the run")
        return sketch_index_of

    def _counters(self, run: Run, record: Record, index: SketchIndex) -> Array:
        if record.sketch is not None:
            return run.sketch(record)
        if record.entry is None or record.dtype is None or not can_sketch(record.dtype):
            raise _Problem("one run holds statistics only: capture it with keep=sketch or keep=full")
        return sketch_of(run.array(record), index)


def _place(record: Record, mesh: MeshCoords) -> tuple[int, ...]:
    """Return the coordinates over which the tensor is sharded or partially summed; ranks with equal coordinates are
    replicas."""
    if record.dims is None:
        return ()
    try:
        axes = dict.fromkeys(shard.axis for _, shard in parse(record.dims).shards())
    except DimsError:
        return ()
    coords = mesh.coords.get(record.key.rank, {})
    return tuple(coords.get(axis, 0) for axis in axes)
