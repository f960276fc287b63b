"""Candidates: possible dims of a site, derived from its axes and the mesh coordinates of its ranks."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations, product
from math import prod

from msgspec import structs

from tapscope.comparator.runs.mesh_coords import Coords
from tapscope.comparator.runs.series import Series
from tapscope.core.axes import Dim, Dims, Section, Shard, Size
from tapscope.core.dims import parse
from tapscope.core.errors import DimsError

_HEADS_PER_KEY = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
"""Ratios of query heads to key heads that are in use."""
_MOST_TURNED = 3
"""Maximum number of axes for which permutations are tried."""
_PARAMETER = "o i"
_NOT_FEATURES = (("1",), ("t",), ("b",), ("s",))


def candidates(series: Series, other: Series, places: Sequence[Coords], axes: Sequence[str]) -> Iterator[Dims]:
    """Yield possible dims: the stated dims extended by the unexplained mesh axes, then dims over all mesh axes."""
    for base in _named(series, other):
        stated = {shard.axis for _, shard in base.shards()} | set(base.replicated)
        plain = structs.replace(base, dims=tuple(map(_unsharded, base.dims)), replicated=())
        for start, known in [(base, stated), (plain, set[str]())][: 1 if base == plain else 2]:
            for over in _distinguishing_axes(places, axes, known):
                sizes = {axis: len({place.get(axis) for place in places}) for axis in axes}
                for choice in product(*(_ways(start, axis) for axis in over)):
                    made = _with(start, over, choice)
                    if len(over) < 3:
                        yield made
                        yield from _too_wide(made, series, other, sizes)
                    elif not any(_is_section(role) for role, _ in choice) and _is_as_wide(made, series, other, sizes):
                        yield made  # filtered, because three axes have hundreds of combinations
                if len(over) == 1:
                    num = len({place.get(over[0]) for place in places})
                    yield from _query_key_value(start, base, series.first.shape, Shard(over[0]), num)
        yield from _cropped(base, other)


def permuted_candidates(
    series: Series, other: Series, places: Sequence[Coords], axes: Sequence[str]
) -> Iterator[tuple[Dims, str | None]]:
    """Yield (dims with permuted axes for ``series``, dims for ``other`` or None if it states its own)."""
    ndim = len(series.first.shape)
    theirs = _parsed(other, ndim)
    if not 1 < ndim <= _MOST_TURNED or len(other.first.shape) != ndim or _parsed(series, ndim) is not None:
        return
    names = _PARAMETER if ":param[" in series.site and ndim == 2 else _USUAL_DIMS[ndim][0]
    base = Dims(tuple(map(_unsharded, theirs.dims))) if theirs is not None else parse(names)
    for order in permutations(range(ndim)):
        if order != tuple(range(ndim)):
            mine = Dims(tuple(base.dims[i] for i in order))
            for made in candidates(_stated(series, mine), other, places, axes) if len(places) > 1 else (mine,):
                yield made, str(base) if theirs is None else None


def _stated(series: Series, dims: Dims) -> Series:
    """Return the series as if its first firing had these dims."""
    first = series.firings[0]
    records = tuple(record._replace(dims=str(dims)) for record in first.records)
    return structs.replace(series, firings=(structs.replace(first, records=records),))


def fused_candidates(
    recorded: Series, other: Series, places: Sequence[Coords], axes: Sequence[str], axis: int
) -> Iterator[Dims]:
    """Yield possible dims of a fused tensor, whose sections are known, so that only the mesh axes are unknown."""
    for base in _named(recorded, other):
        plain = structs.replace(base, dims=tuple(map(_unsharded, base.dims)))
        for over in _distinguishing_axes(places, axes, set()):
            yield _with(plain, over, [("", axis % plain.ndim)] * len(over))


def _features(dims: Dims, series: Series, other: Series, sizes: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor axis, assembled length, length on the other side) of each feature axis, if the other side is one
    record."""
    shape = other.first.shape
    if len(other.firings[0].records) == 1 and len(shape) == dims.ndim == len(series.first.shape):
        for at, dim in enumerate(dims.dims):
            if dim.names not in _NOT_FEATURES:
                parts = prod(sizes.get(shard.axis, 1) for shard in dim.shards if not shard.partial)
                yield at, series.first.shape[at] * parts, shape[at]


def _is_as_wide(dims: Dims, series: Series, other: Series, sizes: Mapping[str, int]) -> bool:
    return all(mine == whole for _, mine, whole in _features(dims, series, other, sizes))


def _too_wide(dims: Dims, series: Series, other: Series, sizes: Mapping[str, int]) -> Iterator[Dims]:
    """Yield dims for shards whose total exceeds the whole: some are copies (key/value heads), or the rest is
    padding."""
    for at, mine, whole in _features(dims, series, other, sizes):
        dim = dims.dims[at]
        if dim.shards and mine > whole > 0 and dim.size is None and not dim.sections:
            for size in ([Size(whole, mine // whole)] if mine % whole == 0 else []) + [Size(whole)]:
                yield structs.replace(
                    dims, dims=(*dims.dims[:at], structs.replace(dim, size=size), *dims.dims[at + 1 :])
                )


def _unsharded(dim: Dim) -> Dim:
    return Dim(("+".join(dim.names).replace("+", "_"),) if dim.sections else dim.names)


def _distinguishing_axes(places: Sequence[Coords], axes: Sequence[str], known: set[str]) -> list[tuple[str, ...]]:
    """Return the smallest sets of up to three additional mesh axes that, with the known ones, identify every rank."""
    free = [axis for axis in axes if axis not in known]
    for num in (1, 2, 3):
        options = [
            over
            for over in combinations(free, num)
            if len({tuple(place.get(axis) for axis in (*known, *over)) for place in places}) == len(places)
        ]
        if options:
            return options
    return []


def _query_key_value(start: Dims, base: Dims, shape: Sequence[int], shard: Shard, num: int) -> Iterator[Dims]:
    """Yield dims with three sections (query, key, value), the first a multiple of the other two."""
    for at, dim in enumerate(start.dims):
        if not _may_be_sections(dim):
            continue
        stated = base.dims[at].names
        names = stated if len(stated) == 3 else tuple(f"{dim.names[0]}{part}" for part in "qkv")
        for heads in _HEADS_PER_KEY:
            if shape[at] * num % (heads + 2) == 0:
                unit = shape[at] * num // (heads + 2)
                sections = tuple(Section(n, Size(unit * k)) for n, k in zip(names, (heads, 1, 1), strict=True))
                parts = (*start.dims[:at], Dim(names, (shard,), sections=sections), *start.dims[at + 1 :])
                yield structs.replace(start, dims=parts)


_Way = tuple[str, int]
"""(role, tensor axis) assigned to one mesh axis; an empty role is plain sharding."""


def _ways(dims: Dims, axis: str) -> list[_Way]:
    ways: list[_Way] = [("", i) for i in reversed(range(dims.ndim)) if dims.dims[i].names != ("1",)]
    ways += [("replicated", 0), ("partial", dims.ndim - 1)]
    ways += [("zigzag", i) for i, dim in enumerate(dims.dims) if dim.names in (("s",), ("t",)) and axis.endswith("cp")]
    ways += [(f"{n} sections", i) for n in (2, 3) for i, dim in enumerate(dims.dims) if _may_be_sections(dim)]
    return ways


def _is_section(role: str) -> bool:
    return role.endswith("sections")


def _may_be_sections(dim: Dim) -> bool:
    return (
        not dim.shards and not dim.sections and dim.size is None and dim.names not in (("1",), ("t",), ("b",), ("s",))
    )


def _with(dims: Dims, axes: Sequence[str], choice: Sequence[_Way]) -> Dims:
    parts, replicated = list(dims.dims), list(dims.replicated)
    for axis, (role, at) in zip(axes, choice, strict=True):
        dim = parts[at]
        if role == "replicated":
            replicated.append(axis)
        elif _is_section(role) and not dim.sections:
            names = tuple(f"{dim.names[0]}{i}" for i in range(int(role[0])))
            parts[at] = Dim(names, (*dim.shards, Shard(axis)), sections=tuple(map(Section, names)))
        else:
            shard = Shard(axis, "zigzag" if role == "zigzag" else None, role == "partial")
            parts[at] = structs.replace(dim, shards=(*dim.shards, shard))
    return structs.replace(dims, dims=tuple(parts), replicated=tuple(replicated))


def _cropped(base: Dims, other: Series) -> Iterator[Dims]:
    """Yield the stated dims with the size of one axis taken from the other side, if that side is one record."""
    shape = other.first.shape
    if len(other.firings[0].records) == 1 and len(shape) == base.ndim:
        for at, dim in enumerate(base.dims):
            if dim.size is None and not dim.sections and dim.names not in _NOT_FEATURES:
                parts = (*base.dims[:at], structs.replace(dim, size=Size(shape[at])), *base.dims[at + 1 :])
                yield structs.replace(base, dims=parts)


_USUAL_DIMS = {
    1: ("t", "h"),
    2: ("t h", "o i"),
    3: ("b s h", "t n d", "s b h"),
    4: ("b n s d", "b s n d", "s b n d"),
}


def _named(series: Series, other: Series) -> list[Dims]:
    """Return the stated dims, else dims with the other side's names, else the usual dims for this number of axes."""
    ndim = len(series.first.shape)
    stated, theirs = (_parsed(one, ndim) for one in (series, other))
    if stated is not None:
        return [stated]
    if theirs is not None:
        return [Dims(tuple(Dim(dim.names if not dim.sections else (dim.names[0],)) for dim in theirs.dims))]
    return list(map(parse, _USUAL_DIMS.get(ndim, (" ".join(f"d{i}" for i in range(ndim)),))))


def _parsed(series: Series, ndim: int) -> Dims | None:
    try:
        dims = parse(series.first.dims) if series.first.dims else None
    except DimsError:
        return None
    return dims if dims is not None and dims.ndim == ndim else None
