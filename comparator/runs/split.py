"""Split: turn ranks with different rows (data, context or expert parallel) into separate firings.

If each rank records its rows, the tensors of the ranks need not be joined: (request, position) already identifies the
matching row of the other run, however uneven or unordered the shards are.
"""

from collections.abc import Mapping

from msgspec import structs

from tapscope.comparator.runs.firings import Firing
from tapscope.comparator.runs.grids import SideRows
from tapscope.comparator.runs.series import Series
from tapscope.core.dims import Dims
from tapscope.run_format.record import Record

_TOKEN_AXES = frozenset({"t", "b", "s"})


def split_series(series: Series, rows: SideRows, coords: Mapping[int, Mapping[str, int]]) -> Series:
    """Return the series with every firing split by the rows of its ranks; unchanged if all ranks hold the same rows."""
    parts = [_split(firing, rows, coords) for firing in series.firings]
    sources = tuple(split_series(one, rows, coords) for one in series.sources)
    firings = tuple(part for firing in parts for part in firing)
    if len(firings) == len(series.firings) or any(len(one.firings) != len(firings) for one in sources):
        return series
    return structs.replace(series, firings=firings, sources=sources)


def _split(firing: Firing, rows: SideRows, coords: Mapping[int, Mapping[str, int]]) -> list[Firing]:
    if len(firing.records) == 1:
        return [firing]
    groups: dict[object, list[Record]] = {}
    for record in firing.records:
        groups.setdefault((id(rows.of(record)), record.rows), []).append(record)
    if len(groups) == 1:
        return [firing]
    split_axes = _axes_between([[coords[r.key.rank] for r in group] for group in groups.values()])
    return [structs.replace(firing, records=tuple(records), split_axes=split_axes) for records in groups.values()]


def _axes_between(parts: list[list[Mapping[str, int]]]) -> frozenset[str]:
    """Return the mesh axes on which parts differ from each other, but ranks within a part do not."""
    axes = {axis for part in parts for place in part for axis in place}
    values = {axis: [{place.get(axis) for place in part} for part in parts] for axis in axes}
    return frozenset(
        a for a, coords in values.items() if all(len(v) == 1 for v in coords) and len(set.union(*coords)) > 1
    )


def without_split_axes(dims: Dims, split_axes: frozenset[str]) -> Dims:
    """Return the dims of one part, whose token axes are no longer sharded over the mesh axes ``split_axes``."""
    if not split_axes:
        return dims
    parts = tuple(
        structs.replace(dim, shards=tuple(s for s in dim.shards if s.partial or s.axis not in split_axes))
        if _TOKEN_AXES.issuperset(dim.names)
        else dim
        for dim in dims.dims
    )
    replicated = tuple(axis for axis in dims.replicated if axis not in split_axes)
    return structs.replace(dims, dims=parts, replicated=replicated, dp=None if dims.dp in split_axes else dims.dp)
