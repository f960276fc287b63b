"""Sharding of a tensor over a mesh as given by dims, in numpy: the inverse of assembly; contains no tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from factories import RunFactory

from tapscope.comparator.assembly.assemble import AssembledTensor, assemble
from tapscope.comparator.runs.mesh_coords import mesh_coords_of
from tapscope.comparator.runs.series import series_of
from tapscope.core.axes import Dim, Dims, Shard
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.kernels.native import summarize_array
from tapscope.run_format.index import Event, RankIndex
from tapscope.run_format.ledger import begin_line
from tapscope.run_format.record import Key, Record
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run
from tapscope.sources import open_run

Array = np.ndarray[Any, Any]
LENGTHS = (8, 24, 16)
"""Sequence lengths of a packed step."""


def places(mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the mesh coordinates of each rank, last axis fastest."""
    sizes = tuple(mesh.values())
    found = [np.unravel_index(rank, sizes) for rank in range(int(np.prod(sizes)))] if sizes else [()]
    return [{axis: int(at) for axis, at in zip(mesh, place, strict=True)} for place in found]


def deal(whole: Array, dims: Dims, mesh: Mapping[str, int], lengths: tuple[int, ...] = ()) -> dict[int, Array]:
    """Return rank -> shard of ``whole``; partial sums are random."""
    for axis, dim in enumerate(dims.dims):
        whole = _padded(_grouped(whole, axis, dim), axis, dim, mesh)
    parts = {}
    for rank, place in enumerate(places(mesh)):
        part = whole
        for axis, dim in enumerate(dims.dims):
            for shard in dim.shards:
                if mesh.get(shard.axis, 1) > 1:
                    part = _share(part, axis, dim, shard, mesh[shard.axis], place[shard.axis], lengths)
        parts[rank] = np.ascontiguousarray(part)
    return parts


def _share(part: Array, axis: int, dim: Dim, shard: Shard, size: int, at: int, lengths: tuple[int, ...]) -> Array:
    if shard.partial:
        summands = [np.random.default_rng(r).integers(-9, 9, part.shape).astype(part.dtype) for r in range(size - 1)]
        return [*summands, part - sum(summands)][at] if summands else part
    if shard.order == "zigzag" or (lengths and dim.names == ("t",) and shard.axis == "cp"):
        return _dealt(part, axis, size, at, lengths if dim.names == ("t",) else (part.shape[axis],), shard.order)
    innermost = shard is dim.shards[-1]
    if dim.sections and not dim.groups:
        sizes = [s.size.whole if s.size else 1 for s in dim.sections]
        copies = [s.size.copies if s.size and innermost else 1 for s in dim.sections]
        cuts = np.cumsum(sizes)[:-1] * part.shape[axis] // sum(sizes)
        return np.concatenate(
            [
                np.split(section, size // each, axis)[at // each]
                for section, each in zip(np.split(part, cuts, axis), copies, strict=True)
            ],
            axis,
        )
    each = dim.size.copies if dim.size and innermost else 1
    return np.array_split(part, size // each, axis)[at // each]


def _dealt(part: Array, axis: int, size: int, at: int, lengths: tuple[int, ...], order: str | None) -> Array:
    found = []
    for sequence in np.split(part, np.cumsum(lengths)[:-1], axis):
        if order == "zigzag":
            chunks = np.array_split(sequence, 2 * size, axis)
            found += [chunks[at], chunks[2 * size - 1 - at]]
        else:
            found.append(np.array_split(sequence, size, axis)[at])
    return np.concatenate(found, axis)


def _grouped(whole: Array, axis: int, dim: Dim) -> Array:
    if not dim.groups:
        return whole
    sizes = [s.size.whole if s.size else whole.shape[axis] // len(dim.sections) for s in dim.sections]
    sections = [np.split(s, dim.groups, axis) for s in np.split(whole, np.cumsum(sizes)[:-1], axis)]
    return np.concatenate([section[g] for g in range(dim.groups) for section in sections], axis)


def _padded(whole: Array, axis: int, dim: Dim, mesh: Mapping[str, int]) -> Array:
    if dim.size is None or dim.size.copies > 1:
        return whole
    ranks = int(np.prod([mesh.get(s.axis, 1) for s in dim.shards]))
    pad = [(0, 0)] * whole.ndim
    pad[axis] = (0, -whole.shape[axis] % (2 * ranks))
    return np.pad(whole, pad, constant_values=77)


def write(
    path: Path,
    parts: Mapping[int, Array],
    dims: str | None,
    mesh: Mapping[str, int],
    *,
    coords: Mapping[int, Mapping[str, int]] | None = None,
    lengths: tuple[int, ...] = (),
) -> Run:
    """Write a run with one firing of one site; ``coords`` override the coordinates that follow from the mesh."""
    with RunFactory(path, mesh=mesh) as run:
        for rank, place in (coords or {}).items():
            run.writers[rank].event("mesh", world_size=len(run.writers), mesh=dict(mesh), coords=dict(place))
        step = _step(lengths)
        run.step(grid=step.grid, rows=step.rows)
        run.put("layers.0.mlp:out", parts, dims=dims)
    return open_run(path)


def _step(lengths: tuple[int, ...]) -> StepInfo:
    starts = [0, *np.cumsum(lengths).tolist()]
    rows = [RowSpan(str(i), 0, n, 0, start) for i, (n, start) in enumerate(zip(lengths, starts, strict=False))]
    return StepInfo(step=0, grid=(sum(lengths),) if lengths else (), rows=tuple(rows))


class MemoryRun(Run):
    """An in-memory run of one firing."""

    def __init__(
        self, parts: Mapping[int, Array], dims: str, mesh: Mapping[str, int], lengths: tuple[int, ...]
    ) -> None:
        self.parts, ranks = parts, {}
        begin = begin_line(_step(lengths), 0)
        for (rank, part), coords in zip(parts.items(), places(mesh), strict=True):
            record = Record(Key("mlp:out", 0, rank), 0, part.dtype.name, part.shape, dims, None, *summarize_array(part))
            events = [Event(rank, "open", {"mesh": dict(mesh), "coords": coords})]
            ranks[rank] = RankIndex(records=Records([record]), begins={0: begin}, events=events)
        super().__init__(Path(), {"mesh": dict(mesh), "version": 2}, ranks)
        assert not self.problems

    def array(self, rec: Record) -> Array:
        """Return the shard of the record's rank."""
        return self.parts[rec.key.rank]


def assembled(run: Run) -> AssembledTensor:
    """Assemble the only firing of a run."""
    (series,) = series_of(run, run.records)
    return assemble(run, mesh_coords_of(run), series.firings[0])
