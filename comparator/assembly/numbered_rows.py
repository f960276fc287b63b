"""Numbered rows: expert tensors whose rows are numbered by another port of their module (``# rows:=PORT``)."""

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from tapscope.comparator.assembly.pieces import Array, Leaf, Piece, Scattered
from tapscope.comparator.assembly.shards import AssemblyError
from tapscope.comparator.runs.mesh_coords import MeshCoords
from tapscope.core.dims import Dims
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run


class NumberedRows(Struct, frozen=True):
    """The records of one firing, scattered into one list of token rows common to all ranks."""

    axis: int
    pieces: tuple[Piece, ...]
    """One piece per record."""
    rows: tuple[tuple[int, int], ...]
    """(first, count) ranges of the token rows held by any rank, as in :attr:`Record.rows`."""


def numbered_rows(run: Run, places: MeshCoords, records: Sequence[Record], dims: Dims) -> NumberedRows:
    """Scatter the rows of each rank to the token rows given by their numbers. Raises AssemblyError if the numbers are
    invalid.

    A repeated row is summed over experts, which the dims must declare as ``partial``.
    """
    axis = dims.index("t")
    if axis is None:
        raise AssemblyError(f"dims '{dims}' number rows, but have no axis t")
    numbers = [_numbers(run, places, record, dims.rows or "", axis) for record in records]
    every = np.concatenate(numbers)
    held, counts = np.unique(every[every >= 0], return_counts=True)
    if not any(shard.partial for _, shard in dims.shards()) and (counts > 1).any():
        twice = int(held[counts > 1][0])
        raise AssemblyError(
            f"token row {twice} occurs {counts.max()} times in {dims.rows}: dims '{dims}' must declare partial "
            "sums, e.g. t[ep:partial]"
        )
    line = run.steps.get(records[0].key.step, {}).get(records[0].key.rank)
    slots = math.prod(line.info.grid) if line is not None and line.info.grid else None
    if slots is not None and len(held) and held[-1] >= slots:
        raise AssemblyError(f"{dims.rows} names token row {held[-1]} in a step of {slots}")
    indices = [np.where(n < 0, -1, np.searchsorted(held, n)) for n in numbers]
    pieces = (Scattered(axis, at, len(held), Leaf(r)) for at, r in zip(indices, records, strict=True))
    return NumberedRows(axis, tuple(pieces), _ranges(held))


def _numbers(run: Run, places: MeshCoords, record: Record, port: str, axis: int) -> Array:
    site = f"{record.key.site.rpartition(':')[0]}:{port}"
    numbering = places.record(run, record.key._replace(site=site))
    if numbering is None or numbering.entry is None:
        raise AssemblyError(f"rank {record.key.rank} has no values of {site}, which number the rows")
    numbers = run.array(numbering).reshape(-1)
    if numbers.dtype.kind not in "iu" or len(numbers) != record.shape[axis]:
        raise AssemblyError(
            f"{site} on rank {record.key.rank} ({numbering.dtype}, {tuple(numbering.shape)}) does not number "
            f"{record.shape[axis]} rows"
        )
    return numbers.astype(np.int64)


def _ranges(rows: Array) -> tuple[tuple[int, int], ...]:
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    counts = np.diff(starts, append=len(rows))
    return tuple(zip(rows[starts].tolist(), counts.tolist(), strict=True))


def with_rows(records: Sequence[Record], rows: tuple[tuple[int, int], ...]) -> tuple[Record, ...]:
    """Return the records marked as parts of one tensor with these token rows."""
    return tuple(record._replace(rows=rows) for record in records)
