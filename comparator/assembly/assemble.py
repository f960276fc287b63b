"""Assemble one firing from the records of all ranks, according to dims and mesh; nothing is guessed silently."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from tapscope.comparator.assembly.merge import is_plain, merge
from tapscope.comparator.assembly.numbered_rows import with_rows
from tapscope.comparator.assembly.pieces import Concatenated, Leaf, Piece, digest, is_partition, leaves
from tapscope.comparator.assembly.shards import AssemblyError, MissingShardsError
from tapscope.comparator.runs.firings import Firing
from tapscope.comparator.runs.mesh_coords import MeshCoords
from tapscope.comparator.runs.split import without_split_axes
from tapscope.core import dims as dims_grammar
from tapscope.core.dims import Dims
from tapscope.core.errors import DimsError
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run

STACKED = (
    "neither run has a mesh or dims: each rank was compared with the same rank of the other run (see --mesh and --dims)"
)
"""Warning for values that are compared rank by rank."""
DATA_PARALLEL = "its ranks are data parallel: each was compared with the same rank of the other run"
"""Note for values that are compared rank by rank, in runs with the same mesh."""


class AssembledTensor(Struct, frozen=True):
    """One firing as one tensor, lazily evaluated."""

    run: Run
    records: tuple[Record, ...]
    piece: Piece | None
    """None if the tensor could not be assembled; :attr:`problem` says why."""
    dims: Dims | None = None
    problem: str = ""
    replicas: tuple[tuple[Piece, Piece, str], ...] = ()
    """(piece, other piece, mesh axis that declares them replicas): declared equal, but their bytes differ."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Reasons why values may be wrong although the tensor could be assembled."""
    lacks_shards: bool = False
    """Whether :attr:`problem` is a missing shard."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, or of the first record if the tensor could not be assembled."""
        return self.piece.shape if self.piece else self.records[0].shape

    @property
    def dtype(self) -> str | None:
        """Dtype of the records."""
        return self.records[0].dtype

    @property
    def has_values(self) -> bool:
        """Whether the bytes of every part are on disk."""
        piece = self.piece
        if isinstance(piece, Leaf):
            return piece.record.entry is not None
        return piece is not None and all(r.entry is not None for r in leaves(piece))

    @property
    def digest(self) -> tuple[object, ...] | None:
        """Structure and hashes of the tensor: equal digests mean equal bytes in equal layout. None if a hash is
        missing."""
        parts = tuple(leaves(self.piece)) if self.piece else ()
        if self.piece is None or any(r.hash is None for r in parts) or self.replicas:
            return None
        return digest(self.piece)

    @property
    def multiset_hash(self) -> tuple[str | None, int] | None:
        """(dtype, sum of bags): equal values suggest equal elements in any order.

        None if a record has no bag, or if the tensor is not a plain partition of its records.
        """
        parts = tuple(leaves(self.piece)) if self.piece else ()
        if self.piece is None or not is_partition(self.piece) or any(r.bag is None for r in parts):
            return None
        return self.dtype, sum(int(r.bag or "0", 16) for r in parts) % 2**64


def assemble(run: Run, places: MeshCoords, firing: Firing) -> AssembledTensor:
    """Assemble one firing. Invalid data does not raise but is reported in :attr:`AssembledTensor.problem`."""
    records = firing.records
    dims: Dims | None = None
    try:
        dims = _dims(records, firing.split_axes)
        if len(records) == 1 and (dims is None or is_plain(dims, places)):
            return AssembledTensor(run, records, Leaf(records[0]), dims)
        if firing.is_stacked:
            inorder = tuple(sorted(records, key=lambda record: record.key.rank))
            stacked = Concatenated(0, tuple(Leaf(record, is_vector=not record.shape) for record in inorder))
            if places.has_axes:
                return AssembledTensor(run, inorder, stacked, dims, notes=(DATA_PARALLEL,))
            return AssembledTensor(run, inorder, stacked, dims, warnings=(STACKED,))
        work = merge(run, places, records, dims, is_replicated=firing.is_replicated)
    except (AssemblyError, DimsError) as error:
        return AssembledTensor(run, records, None, dims, str(error), lacks_shards=isinstance(error, MissingShardsError))
    ((_, piece),) = work.items
    if work.rows is not None:
        records = with_rows(records, work.rows)
    return AssembledTensor(run, records, piece, dims, "", tuple(work.replicas), tuple(work.notes), tuple(work.warnings))


def _dims(records: Sequence[Record], split_axes: frozenset[str]) -> Dims | None:
    if len(records) > 1:
        _check_agree(records)
    text = records[0].dims
    if text is None:
        return None
    dims = dims_grammar.parse(text)
    for record in records:
        dims.check(record.shape)
    return without_split_axes(dims, split_axes)


def _check_agree(records: Sequence[Record]) -> None:
    all_dims = {r.dims for r in records}
    if len(all_dims) > 1:
        raise AssemblyError(f"ranks disagree on the dims: {', '.join(sorted(map(repr, all_dims)))}")
    if len({r.dtype for r in records}) > 1:
        raise AssemblyError(f"ranks disagree on the dtype: {', '.join(sorted({str(r.dtype) for r in records}))}")
    twice = [rank for rank, num in Counter(r.key.rank for r in records).items() if num > 1]
    if twice:
        raise AssemblyError(f"rank {twice[0]} recorded this firing {len(records)} times: expected one record per rank")
