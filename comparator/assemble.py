"""Assemble: put what the ranks recorded of one firing back together, by dims and mesh; nothing is guessed silently."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tapscope import dims as dims_grammar
from tapscope.comparator.pieces import Joined, Leaf, Piece, Summed, digest, is_joined, leaves
from tapscope.comparator.series import Firing
from tapscope.dims import Dims
from tapscope.errors import DimsError
from tapscope.record import Record
from tapscope.run import Run

Coords = dict[str, int]


@dataclass(frozen=True, slots=True)
class Whole:
    """One firing as one tensor."""

    run: Run
    records: tuple[Record, ...]
    piece: Piece | None
    """None when it could not be put together; :attr:`problem` says why."""
    dims: Dims | None = None
    problem: str = ""
    replicas: tuple[tuple[Piece, Piece, str], ...] = ()
    """Pairs that must hold equal values though their bytes differ, and the mesh axis that says so."""
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole, or of the first record where it could not be put together."""
        return self.piece.shape if self.piece else self.records[0].shape

    @property
    def dtype(self) -> str | None:
        """Element type of the records."""
        return self.records[0].dtype

    @property
    def has_values(self) -> bool:
        """Whether the bytes of every part are on disk."""
        return self.piece is not None and all(r.entry is not None for r in leaves(self.piece))

    @property
    def digest(self) -> tuple[object, ...] | None:
        """Equal digests mean equal bytes in one layout; None when a hash is missing."""
        parts = tuple(leaves(self.piece)) if self.piece else ()
        if self.piece is None or any(r.hash is None for r in parts) or self.replicas:
            return None
        return digest(self.piece)

    @property
    def bag(self) -> tuple[str | None, int] | None:
        """Equal bags propose equal elements in any order; None without bags or where it is no plain join of shards."""
        parts = tuple(leaves(self.piece)) if self.piece else ()
        if self.piece is None or not is_joined(self.piece) or any(r.bag is None for r in parts):
            return None
        return self.dtype, sum(int(r.bag or "0", 16) for r in parts) % 2**64


@dataclass(slots=True)
class _Work:
    """Pieces with their mesh coordinates, merged axis by axis until one is left."""

    pieces: list[tuple[Coords, Piece]]
    replicas: list[tuple[Piece, Piece, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Unassembled(Exception):
    """This firing cannot be put together; the text says why and what would help."""


def assemble(run: Run, coords: Mapping[int, Coords], firing: Firing) -> Whole:
    """Put one firing together, ``coords`` being each rank's; never raises, see :attr:`Whole.problem`."""
    records = firing.records
    dims: Dims | None = None
    try:
        dims = _dims(records)
        work = _merge(run, coords, records, dims)
    except (_Unassembled, DimsError) as error:
        return Whole(run, records, None, dims, str(error))
    return Whole(run, records, work.pieces[0][1], dims, "", tuple(work.replicas), tuple(work.notes))


def _dims(records: Sequence[Record]) -> Dims | None:
    texts = {r.dims for r in records}
    if len(texts) > 1:
        raise _Unassembled(f"ranks disagree on the dims: {', '.join(sorted(map(repr, texts)))}")
    if len({r.dtype for r in records}) > 1:
        raise _Unassembled(f"ranks disagree on the dtype: {', '.join(sorted({str(r.dtype) for r in records}))}")
    text = records[0].dims
    if text is None:
        return None
    dims = dims_grammar.parse(text)
    for record in records:
        dims.check(record.shape)
    return dims


def coords_of(run: Run) -> dict[int, Coords]:
    """Rank -> its place in the mesh; a run without a mesh gives the rank itself."""
    return {rank: run.coords(rank) or {"rank": rank} for rank in run.ranks}


def _merge(run: Run, coords: Mapping[int, Coords], records: Sequence[Record], dims: Dims | None) -> _Work:
    work = _Work([(coords[r.key.rank], Leaf(r)) for r in records])
    for axis in dims.replicated if dims else ():
        _count_replicas(work, run, axis)
        _pick(work, axis, declared=True)
    if len(records) == 1 and (dims is None or not dims.shards()):
        return work
    for index, dim in enumerate(dims.dims if dims else ()):
        for shard in reversed(dim.shards):  # the innermost shard is put together first
            if shard.order == "zigzag" and run.mesh.get(shard.axis, 1) > 1:
                raise _Unassembled(f"zigzag shards over {shard.axis} are not put back in order yet (dims '{dims}')")
            _spread(work, run, shard.axis, None if shard.partial else index, dims)
    for axis in _active(work):
        _pick(work, axis, declared=False)
    if len(work.pieces) > 1:
        raise _Unassembled(f"{len(work.pieces)} ranks have the same mesh coordinates {work.pieces[0][0]}")
    return work


def _active(work: _Work) -> list[str]:
    """Mesh axes along which the remaining pieces differ."""
    axes = sorted({axis for coords, _ in work.pieces for axis in coords})
    return [axis for axis in axes if len({coords.get(axis) for coords, _ in work.pieces}) > 1]


def _groups(work: _Work, axis: str) -> list[list[tuple[Coords, Piece]]]:
    """Pieces that differ in ``axis`` only, by coordinate."""
    groups: dict[tuple[tuple[str, int], ...], list[tuple[Coords, Piece]]] = {}
    for coords, piece in sorted(work.pieces, key=lambda p: p[0].get(axis, 0)):
        rest = tuple(sorted((a, c) for a, c in coords.items() if a != axis))
        groups.setdefault(rest, []).append((coords, piece))
    return list(groups.values())


def _pick(work: _Work, axis: str, *, declared: bool) -> None:
    """Keep the first of each group of replicas; the others must be equal to it."""
    groups = _groups(work, axis)
    if declared and len(work.pieces) > 1 and all(len(group) == 1 for group in groups) and axis in _active(work):
        work.notes.append(f"'{axis}:replicated' was not checked: another axis already tells its ranks apart")
    kept = []
    for group in groups:
        (coords, first), *others = group
        for _, other in others:
            if _same_bytes(first, other):
                continue
            if not declared:
                ranks = sorted(r.key.rank for _, p in group for r in leaves(p))
                raise _Unassembled(
                    f"ranks {', '.join(map(str, ranks))} hold different values and no dims say how they belong "
                    f"together: annotate e.g. 't h[{axis}]', 't h[{axis}:partial]' or 't h # {axis}:replicated'"
                )
            work.replicas.append((first, other, axis))
        kept.append(({a: c for a, c in coords.items() if a != axis}, first))
    work.pieces = kept


def _count_replicas(work: _Work, run: Run, axis: str) -> None:
    size, found = run.mesh.get(axis, 1), len({coords.get(axis) for coords, _ in work.pieces})
    if found < size:
        work.notes.append(f"{found} of {size} replicas over {axis} were recorded: the others are not checked")


def _same_bytes(first: Piece, other: Piece) -> bool:
    pairs = list(zip(leaves(first), leaves(other), strict=True))
    return all(a.hash is not None and (a.hash, a.dtype, a.shape) == (b.hash, b.dtype, b.shape) for a, b in pairs)


def _spread(work: _Work, run: Run, axis: str, tensor_axis: int | None, dims: Dims | None) -> None:
    """Join shards along ``tensor_axis``, or add summands up where it is None."""
    size = run.mesh.get(axis, 1)
    if size == 1:
        return
    merged: list[tuple[Coords, Piece]] = []
    for group in _groups(work, axis):
        found = [coords.get(axis) for coords, _ in group]
        if found != list(range(size)):
            missing = sorted(set(range(size)) - {c for c in found if c is not None})
            raise _Unassembled(f"dims '{dims}' need {size} shards over {axis}; {_list(missing)} missing")
        parts = tuple(piece for _, piece in group)
        rest = {a: c for a, c in group[0][0].items() if a != axis}
        if tensor_axis is None:
            _check_summands(work, parts, axis)
            merged.append((rest, Summed(parts)))
        else:
            _check_shards(parts, tensor_axis, axis)
            merged.append((rest, Joined(tensor_axis, parts)))
    work.pieces = merged


def _check_shards(parts: Sequence[Piece], tensor_axis: int, axis: str) -> None:
    rests = {(*p.shape[:tensor_axis], *p.shape[tensor_axis + 1 :]) for p in parts}
    if len(rests) > 1:
        raise _Unassembled(f"shards over {axis} do not fit: shapes {', '.join(str(p.shape) for p in parts)}")


def _check_summands(work: _Work, parts: Sequence[Piece], axis: str) -> None:
    if len({p.shape for p in parts}) > 1:
        raise _Unassembled(f"summands over {axis} do not fit: shapes {', '.join(str(p.shape) for p in parts)}")
    nonzero = any(r.stats is None or r.stats.absmax != 0.0 for r in leaves(parts[0]))
    if nonzero and all(_same_bytes(parts[0], other) for other in parts[1:]):
        work.notes.append(
            f"the {len(parts)} summands over {axis} are identical: a value that is replicated, not partial, "
            f"comes out {len(parts)} times too large"
        )


def _list(shards: list[int]) -> str:
    return f"shard {shards[0]} is" if len(shards) == 1 else f"shards {', '.join(map(str, shards))} are"
