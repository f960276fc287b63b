"""Suggest: which dims would explain a site that could not be put together, tried out on the pair itself."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

from tapscope.axes import STAGES, Dim, Dims, Section, Shard, Size
from tapscope.comparator.align import Join, Plan
from tapscope.comparator.match import Pair
from tapscope.comparator.measure import WidthError, measure
from tapscope.comparator.places import active, projected
from tapscope.comparator.prepare import Prepared, Preparer
from tapscope.comparator.replicas import check_replicas
from tapscope.comparator.series import Series
from tapscope.dims import parse
from tapscope.errors import DataError, DimsError

AGREES = 0.05
"""Relative error up to which values are called those of the other run: dims that are wrong give about 1."""
_MOST = 64
"""Candidates that are tried for one side of a site."""
_SITES = 24
"""Sites that are tried in one comparison; the others of a kind are told what held for the first."""
_ROWS = 128
"""Rows that are read to see whether values agree."""
_ELEMENTS = 1 << 22
_NOT_FEATURES = (("1",), ("t",), ("b",), ("s",))
_LAYER = re.compile(r"(?<=\.)\d+(?=[.:])")


@dataclass(frozen=True, slots=True)
class _Tried:
    """What one candidate gives."""

    dims: str
    error: float
    """Relative error of the first rows; NaN where there are no values to compare."""


@dataclass(slots=True)
class Suggester:
    """Suggests dims for the pairs of one comparison."""

    preparer: Preparer
    _known: dict[str, str] = field(default_factory=dict)

    def suggest(self, pair: Pair, *, broken: bool) -> str:
        """A sentence that names the dims that would lay the pair's sides over each other; where shards are ``broken``,
        that is could not be put together, also that none do."""
        assert pair.baseline is not None
        assert pair.target is not None
        kind = _LAYER.sub("*", pair.target.site)
        if kind not in self._known:
            self._known[kind] = self._try(pair, broken) if len(self._known) < _SITES else ""
        return self._known[kind]

    def _try(self, pair: Pair, broken: bool) -> str:
        said = []
        for side, (series, other) in enumerate(((pair.baseline, pair.target), (pair.target, pair.baseline))):
            assert series is not None
            assert other is not None
            if series.recipe is None and other.recipe is None and series.first.shape:
                said.append(self._try_side(pair, side, series, other))
        fits = next((text for text in said if "fit" in text), "")
        return fits or (next((text for text in said if text), "") if broken else "")

    def _try_side(self, pair: Pair, side: int, series: Series, other: Series) -> str:
        places = [self.preparer.places[side].coords[r.key.rank] for r in series.firings[0].records]
        axes = [axis for axis in active(projected(places, [])) if axis != "rank" and axis not in STAGES]
        found = [
            tried
            for dims in islice(_candidates(series, other, axes), _MOST)
            if (tried := self._measured(pair, side, dims)) is not None
        ]
        name = ("baseline", "target")[side]
        agreeing = [t for t in found if t.error <= AGREES]
        best = min(agreeing, key=lambda t: ("=" in t.dims, t.error, len(t.dims)), default=None)
        if best is not None:
            error = "equal values" if best.error == 0 else f"relative error {best.error:.0e}"
            return f"'{best.dims}' would fit ({error}): --dims '{name}:{series.site}={best.dims}'"
        unread = [t.dims for t in found if math.isnan(t.error)]
        if unread:
            return f"of its shape, {' or '.join(map(repr, unread[:3]))} would fit: --dims '{name}:{series.site}=...'"
        over = " and ".join(axes)
        return f"no sharding, sum or replication over {over} gives the {_other(name)}'s values" if axes else ""

    def _measured(self, pair: Pair, side: int, dims: Dims) -> _Tried | None:
        """None where the dims cannot lay the pair's sides over each other."""
        text = str(dims)
        changed = [_first_with(one, text if i == side else None) for i, one in enumerate((pair.baseline, pair.target))]
        try:
            ready = self.preparer.prepare(replace(pair, baseline=changed[0], target=changed[1]))
        except DimsError:
            return None
        if ready.problem or not ready.plan.joins:
            return None
        if not all(w.has_values for w in ready.used):
            return _Tried(text, math.nan)
        try:
            total = measure(_some_rows(ready)).total
            replicas = math.prod(ready.left[0].shape) <= _ELEMENTS and check_replicas(ready.used).problem
        except (WidthError, DataError):
            return None
        return None if replicas else _Tried(text, total.rel_l2)


def _other(name: str) -> str:
    return "target" if name == "baseline" else "baseline"


def _first_with(series: Series | None, dims: str | None) -> Series:
    """The first firing alone, with other dims."""
    assert series is not None
    firing = series.firings[0]
    if dims is not None:
        firing = replace(firing, records=tuple(replace(r, dims=dims) for r in firing.records))
    return replace(series, firings=(firing,))


def _some_rows(ready: Prepared) -> Prepared:
    join = ready.plan.joins[0]
    few = [
        rows[:_ROWS] if not isinstance(rows, slice) else _head(rows) for rows in (join.baseline_rows, join.target_rows)
    ]
    pairs = None if join.pairs is None else join.pairs[:_ROWS]
    return replace(ready, plan=Plan((Join(join.baseline, join.target, few[0], few[1], pairs, aligned=False),)))


def _head(rows: slice) -> slice:
    start = rows.start or 0
    return slice(start, start + _ROWS if rows.stop is None else min(rows.stop, start + _ROWS))


def _candidates(series: Series, other: Series, axes: Sequence[str]) -> Iterator[Dims]:
    """Dims that could be meant: the stated ones with the unexplained axes added, then any over all axes."""
    for base in _named(series, other):
        stated = {shard.axis for _, shard in base.shards()} | set(base.replicated)
        missing = [axis for axis in axes if axis not in stated]
        plain = replace(base, dims=tuple(Dim(dim.names) for dim in base.dims), replicated=())
        for start, over in ((base, missing), (plain, list(axes))):
            if over and len(over) <= 2:
                for choice in product(*(_ways(start, axis) for axis in over)):
                    yield _with(start, over, choice)
        yield from _cropped(base, other)


_Way = tuple[str, int]
"""(how, tensor axis) of one mesh axis."""


def _ways(dims: Dims, axis: str) -> list[_Way]:
    ways: list[_Way] = [("", i) for i in reversed(range(dims.ndim)) if dims.dims[i].names != ("1",)]
    ways += [("replicated", 0), ("partial", dims.ndim - 1)]
    ways += [("zigzag", i) for i, dim in enumerate(dims.dims) if dim.names in (("s",), ("t",)) and axis.endswith("cp")]
    ways += [(f"{n} sections", i) for n in (2, 3) for i, dim in enumerate(dims.dims) if _may_be_sections(dim)]
    return ways


def _may_be_sections(dim: Dim) -> bool:
    return (
        not dim.shards and not dim.sections and dim.size is None and dim.names not in (("1",), ("t",), ("b",), ("s",))
    )


def _with(dims: Dims, axes: Sequence[str], choice: Sequence[_Way]) -> Dims:
    parts, replicated = list(dims.dims), list(dims.replicated)
    for axis, (how, at) in zip(axes, choice, strict=True):
        dim = parts[at]
        if how == "replicated":
            replicated.append(axis)
        elif how.endswith("sections") and not dim.sections:
            names = tuple(f"{dim.names[0]}{i}" for i in range(int(how[0])))
            parts[at] = Dim(names, (*dim.shards, Shard(axis)), sections=tuple(map(Section, names)))
        else:
            shard = Shard(axis, "zigzag" if how == "zigzag" else None, how == "partial")
            parts[at] = replace(dim, shards=(*dim.shards, shard))
    return replace(dims, dims=tuple(parts), replicated=tuple(replicated))


def _cropped(base: Dims, other: Series) -> Iterator[Dims]:
    """The stated dims with the other side's size of an axis, where that is whole."""
    shape = other.first.shape
    if len(other.firings[0].records) == 1 and len(shape) == base.ndim:
        for at, dim in enumerate(base.dims):
            if dim.size is None and not dim.sections and dim.names not in _NOT_FEATURES:
                parts = (*base.dims[:at], replace(dim, size=Size(shape[at])), *base.dims[at + 1 :])
                yield replace(base, dims=parts)


_USUAL = {
    1: ("t", "h"),
    2: ("t h", "o i"),
    3: ("b s h", "t n d", "s b h"),
    4: ("b n s d", "b s n d", "s b n d"),
}


def _named(series: Series, other: Series) -> list[Dims]:
    """The dims that are stated, else the other side's names, else the usual ones for as many axes."""
    ndim = len(series.first.shape)
    stated, theirs = (_parsed(one, ndim) for one in (series, other))
    if stated is not None:
        return [stated]
    if theirs is not None:
        return [Dims(tuple(Dim(dim.names if not dim.sections else (dim.names[0],)) for dim in theirs.dims))]
    return list(map(parse, _USUAL.get(ndim, (" ".join(f"d{i}" for i in range(ndim)),))))


def _parsed(series: Series, ndim: int) -> Dims | None:
    try:
        found = parse(series.first.dims) if series.first.dims else None
    except DimsError:
        return None
    return found if found is not None and found.ndim == ndim else None
