"""Merge the records of one firing into one piece, one mesh axis at a time."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct, field

from tapscope.comparator.assembly.numbered_rows import numbered_rows
from tapscope.comparator.assembly.pieces import Concatenated, Leaf, Piece, Summed, digest, leaves
from tapscope.comparator.assembly.shards import (
    AssemblyError,
    MissingShardsError,
    concat_shards,
    crop,
    deinterleave,
    ungroup,
)
from tapscope.comparator.runs.mesh_coords import Coords, MeshCoords, project_coords, varying_axes
from tapscope.core.axes import STAGES, Dim, Dims, Shard
from tapscope.core.site import compact_ranges, port_of
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run


class MergeState(Struct):
    """Pieces with their mesh coordinates, merged axis by axis until a single piece remains."""

    places: MeshCoords
    items: list[tuple[Coords, Piece]]
    dims: Dims | None
    replicas: list[tuple[Piece, Piece, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: tuple[tuple[int, int], ...] | None = None
    """(first, count) of the token rows of the whole tensor, if another port numbers them."""

    def groups(self, axes: Iterable[str]) -> list[list[tuple[Coords, Piece]]]:
        """Return groups of items that differ only in ``axes``, each sorted by coordinate."""
        axes = tuple(axes)
        by_rest: dict[tuple[tuple[str, int], ...], list[tuple[Coords, Piece]]] = {}
        for place, piece in sorted(self.items, key=lambda item: tuple(item[0].get(axis, 0) for axis in axes)):
            rest = tuple(sorted((a, c) for a, c in place.items() if a not in axes))
            by_rest.setdefault(rest, []).append((place, piece))
        return list(by_rest.values())

    def ranks(self) -> str:
        """Return the ranks of the remaining records as compact text."""
        return compact_ranges({r.key.rank for _, piece in self.items for r in leaves(piece)})


def is_plain(dims: Dims, places: MeshCoords) -> bool:
    """Return whether one record is the whole tensor: its dims only name axes, or shard them over mesh axes of size
    1."""
    if dims.replicated or dims.rows or dims.dp:
        return False
    return all(
        not dim.sections and dim.size is None and all(places.size(shard.axis) == 1 for shard in dim.shards)
        for dim in dims.dims
    )


def merge(
    run: Run, places: MeshCoords, records: Sequence[Record], dims: Dims | None, *, is_replicated: bool = False
) -> MergeState:
    """Merge the records of a firing into one piece. Raises AssemblyError if that requires a guess.

    ``is_replicated``: records that no dims distinguish are expected to be equal.
    """
    ranks = tuple(r.key.rank for r in records)
    named_axes = (*(shard.axis for _, shard in dims.shards()), *dims.replicated, dims.dp or "") if dims else ()
    kept = places.known.get((ranks, named_axes))
    if kept is None:
        rank_coords = [places.coords[rank] for rank in ranks]
        _check_places(ranks, rank_coords)
        kept = places.known[ranks, named_axes] = project_coords(rank_coords, named_axes)
    pieces: Sequence[Piece] = [Leaf(r) for r in records]
    work = MergeState(places, [], dims)
    if dims is not None and dims.rows:
        numbered = numbered_rows(run, places, records, dims)
        pieces, work.rows = numbered.pieces, numbered.rows
    work.items = list(zip(kept, pieces, strict=True))
    if dims is not None and dims.replicated:
        _pick_replicas(work, dims, [places.coords[rank] for rank in ranks])
    if any(0 in piece.shape for piece in pieces):
        _drop_empty(work)
    for axis, dim in enumerate(dims.dims if dims else ()):
        if dim.shards or dim.size or dim.sections:
            _merge_shards(work, run, axis, dim)
    _join_requests(work)
    _pick_equal(work, is_replicated=is_replicated)
    return work


def _check_places(ranks: Sequence[int], rank_coords: Sequence[Coords]) -> None:
    seen: dict[tuple[tuple[str, int], ...], int] = {}
    for rank, place in zip(ranks, rank_coords, strict=True):
        other = seen.setdefault(tuple(sorted(place.items())), rank)
        if other != rank:
            raise AssemblyError(f"ranks {other} and {rank} have the same mesh coordinates {dict(place)}")


def _pick_replicas(work: MergeState, dims: Dims, rank_coords: Sequence[Coords]) -> None:
    """Keep the first of each group of declared replicas, and record the ones whose bytes differ from it."""
    axes = [axis for axis in dims.replicated if axis in varying_axes(rank_coords)]
    for axis in dims.replicated:
        num_recorded, size = len({place.get(axis) for place in rank_coords}), work.places.size(axis)
        if num_recorded < size and axis not in STAGES:
            work.notes.append(
                f"{num_recorded} of {size} replicas over {axis} were recorded: the others are not checked"
            )
    groups = work.groups(axes)
    if axes and len(work.items) > 1 and all(len(group) == 1 for group in groups):
        work.notes.append(f"'{axes[0]}:replicated' was not checked: another axis already distinguishes its ranks")
    kept: list[tuple[Coords, Piece]] = []
    for (place, first), *others in groups:
        rest = {axis: at for axis, at in place.items() if axis not in axes}
        kept.append((rest, first))
        work.replicas += [(first, other, "+".join(axes)) for _, other in others if not _same_bytes(first, other)]
    work.items = kept


def _drop_empty(work: MergeState) -> None:
    """Drop ranks without rows of the batch (idle data-parallel ranks)."""
    axis = work.dims.dp if work.dims and work.dims.dp else "dp"
    filled = [item for item in work.items if math.prod(item[1].shape)]
    sharded = axis in {shard.axis for _, shard in (work.dims.shards() if work.dims else ())}
    if not sharded and 0 < len(filled) < len(work.items) and axis in varying_axes(place for place, _ in work.items):
        work.notes.append(f"{len(work.items) - len(filled)} ranks of {axis} hold no rows")
        work.items = filled


def _merge_shards(work: MergeState, run: Run, axis: int, dim: Dim) -> None:
    """Merge the shards along one tensor axis, innermost mesh axis first."""
    sizes = [work.places.size(shard.axis) for shard in dim.shards if not shard.partial]
    if dim.groups:
        share = math.prod(sizes)
        work.items = [(place, ungroup(piece, axis, dim, share)) for place, piece in work.items]
    for shard in reversed(dim.shards):
        size = work.places.size(shard.axis)
        if size == 1:
            continue
        merged: list[tuple[Coords, Piece]] = []
        for group in work.groups([shard.axis]):
            _check_complete(work, group, shard, size)
            parts = [piece for _, piece in group]
            rest = {a: c for a, c in group[0][0].items() if a != shard.axis}
            merged.append((rest, _put_together(work, run, parts, axis, dim, shard)))
        work.items = merged
    sentences: list[str] = []
    work.items = [(place, crop(piece, axis, dim, sentences.append)) for place, piece in work.items]
    work.notes += dict.fromkeys(sentences)


def _check_complete(work: MergeState, group: Sequence[tuple[Coords, Piece]], shard: Shard, size: int) -> None:
    coords = [place.get(shard.axis) for place, _ in group]
    if coords == list(range(size)):
        return
    missing = sorted(set(range(size)) - {at for at in coords if at is not None})
    lacks = f"; {_list(missing)} missing" if missing else ""
    is_sound = missing and all(at in range(size) for at in coords)
    odd = "" if is_sound else f"; the coordinates of the ranks are {_places(coords)}"
    error = MissingShardsError if is_sound else AssemblyError
    raise error(f"dims '{work.dims}' need {size} shards over {shard.axis}{lacks}{odd}")


def _places(coords: Sequence[int | None]) -> str:
    return ", ".join("unknown" if at is None else str(at) for at in coords)


def _put_together(work: MergeState, run: Run, parts: list[Piece], axis: int, dim: Dim, shard: Shard) -> Piece:
    if shard.partial and _are_reduced(parts):
        work.notes.append(f"the gradients of the ranks of {shard.axis} are equal: they are taken as already summed")
        return parts[0]
    if shard.partial:
        _check_summands(work, parts, shard.axis)
    if shard.partial or (work.rows is not None and dim.names == ("t",)):  # numbered rows are already scattered
        return Summed(tuple(parts))
    rests = {(*p.shape[:axis], *p.shape[axis + 1 :]) for p in parts}
    if len(rests) > 1:
        raise AssemblyError(
            f"shards over {shard.axis} have incompatible shapes: {', '.join(str(p.shape) for p in parts)}"
        )
    lengths = interleaved_lengths(run, parts, axis, dim, shard)
    if lengths is not None:
        return deinterleave(parts, axis, lengths, zigzag=shard.order == "zigzag")
    piece, equal = concat_shards(parts, axis, dim, copies=shard is dim.shards[-1])
    work.replicas += [(one, other, shard.axis) for one, other in equal if not _same_bytes(one, other)]
    return piece


def _are_reduced(parts: Sequence[Piece]) -> bool:
    """Return whether the parts are parameter gradients captured after their all-reduce.

    They are then equal, whereas partial sums over different tokens differ.
    """
    port = port_of(next(iter(leaves(parts[0]))).key.site)
    is_gradient = port.startswith("param[") and port.endswith(".grad")
    return is_gradient and all(_same_bytes(parts[0], other) for other in parts[1:])


def _check_summands(work: MergeState, parts: Sequence[Piece], axis: str) -> None:
    if len({p.shape for p in parts}) > 1:
        raise AssemblyError(f"summands over {axis} have incompatible shapes: {', '.join(str(p.shape) for p in parts)}")
    are_equal = all(_same_bytes(parts[0], other) for other in parts[1:])
    if are_equal and any(r.stats is None or r.stats.absmax != 0.0 for r in leaves(parts[0])):
        work.warnings.append(
            f"the {len(parts)} summands over {axis} are identical: a value that is replicated, not partial, "
            f"comes out {len(parts)} times too large"
        )


def _join_requests(work: MergeState) -> None:
    """Concatenate the ranks of the mesh axis that the dims declare data parallel; each holds its own requests."""
    axis = work.dims.dp if work.dims else None
    if work.dims is None or axis is None or axis not in varying_axes(place for place, _ in work.items):
        return
    at = next((i for name in ("t", "b") if (i := work.dims.index(name)) is not None), None)
    for group in work.groups([axis]):
        if at is None and not all(_same_bytes(group[0][1], piece) for _, piece in group):
            raise AssemblyError(f"dims '{work.dims}' name no axis t or b to join the ranks of {axis} along")
    if at is None:
        return
    work.items = [
        ({a: c for a, c in group[0][0].items() if a != axis}, Concatenated(at, tuple(piece for _, piece in group)))
        for group in work.groups([axis])
    ]
    work.notes.append(f"the ranks of {axis} hold different requests: joined along {work.dims.dims[at]}")


def _pick_equal(work: MergeState, *, is_replicated: bool) -> None:
    """Keep one of the pieces that no dims distinguish; their bytes must be equal."""
    if len(work.items) < 2:
        return
    (place, first), *others = work.items
    for _, other in others:
        if _same_bytes(first, other):
            continue
        if is_replicated or (first.shape == other.shape and _unhashed(first, other)):
            work.replicas.append((first, other, "ranks"))
            continue
        raise AssemblyError(_unexplained(work))
    work.items = [(place, first)]


def _unexplained(work: MergeState) -> str:
    axes = varying_axes(place for place, _ in work.items)
    axis = next((a for a in axes if a != "rank"), None)
    ranks = f"ranks {work.ranks()} hold different values"
    if axis is None:
        return f"{ranks} and the run has no mesh that relates them: state it, e.g. --mesh tp=2"
    if axis in STAGES:
        return (
            f"{ranks}: the stages of {axis} recorded different values at one site; do layer numbers start at 0 on each "
            "stage? Rename them with a map"
        )
    if work.dims is None:
        return (
            f"{ranks} and no dims relate them: annotate e.g. 't h[{axis}]', 't h[{axis}:partial]' or "
            f"'t h # {axis}:replicated'"
        )
    unknown = sorted({s.axis for _, s in work.dims.shards() if work.places.size(s.axis) == 1})
    lacks = f" ({work.places.describe()} has no {', '.join(unknown)})" if unknown else ""
    return (
        f"{ranks} and dims '{work.dims}' do not mention {', '.join(axes)}{lacks}: shard an axis over {axis}, e.g. "
        f"h[{axis}] or t[{axis}], or declare '# {axis}:replicated'"
    )


def _same_bytes(first: Piece, other: Piece) -> bool:
    hashed = all(r.hash is not None for piece in (first, other) for r in leaves(piece))
    return hashed and digest(first) == digest(other)


def _unhashed(*pieces: Piece) -> bool:
    return any(r.hash is None for piece in pieces for r in leaves(piece))


def _list(shards: list[int]) -> str:
    return f"shard {shards[0]} is" if len(shards) == 1 else f"shards {', '.join(map(str, shards))} are"


def interleaved_lengths(run: Run, parts: Sequence[Piece], axis: int, dim: Dim, shard: Shard) -> list[int] | None:
    """Return the lengths of the sequences that were interleaved over the shards; None if shards are contiguous parts.

    Packed tokens ``t`` are distributed sequence by sequence, as in Megatron-core and SGLang under context parallelism;
    ``s`` is one sequence. Raises AssemblyError for an order that cannot be undone.
    """
    total = sum(part.shape[axis] for part in parts)
    zigzag, packed = shard.order == "zigzag", dim.names == ("t",)
    if zigzag and not packed and dim.names != ("s",):
        raise AssemblyError(f"zigzag order applies to the axes s and t, not to '{dim}'")
    if not packed or not (zigzag or shard.axis.endswith("cp")):
        return [total] if zigzag else None
    key = next(leaves(parts[0])).key
    lengths = sequence_lengths(run, key.step, key.rank)
    if zigzag and not lengths:
        raise AssemblyError(
            f"'{dim}' is distributed sequence by sequence, but no row table of step {key.step} has their lengths: "
            f"capture with rows (in SGLang dumps: cu_seqlens_q, all lengths multiples of {2 * len(parts)}), or name "
            "the axis s if it is one sequence"
        )
    divide = len(lengths) > 1 and all(length % len(parts) == 0 for length in lengths)
    return lengths if zigzag or (divide and sum(lengths) <= total) else None


def sequence_lengths(run: Run, step: int, rank: int) -> list[int]:
    """Return the token slots of each sequence of a step, padding included, from the rank's row table; empty if
    unknown."""
    line = run.steps.get(step, {}).get(rank)
    if line is None or not line.info.grid or not line.info.rows:
        return []
    if len(line.info.grid) == 2:
        return [line.info.grid[1]] * line.info.grid[0]
    rows = sorted(line.info.rows, key=lambda row: row.slot)
    others = [row.slot for before, row in pairwise(rows) if row.request != before.request]
    return [stop - start for start, stop in pairwise([0, *others, math.prod(line.info.grid)])]
