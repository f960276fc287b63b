"""Shape keys: sites with equal keys are prepared in the same way, so the preparation is done once.

A model has the same sites in every layer, and a site has many steps. If each firing consists of one record or of
adjacent shards, its layouts and plan apply to every pair whose records have equal keys, shapes, dtypes and dims.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import overload

from msgspec import structs

from tapscope.comparator.alignment.layout import is_mask
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.pieces import Concatenated, Leaf, Piece, Summed, leaves
from tapscope.comparator.runs.firings import Firing, Firings
from tapscope.comparator.runs.series import Series
from tapscope.core.site import is_parameter, port_of
from tapscope.run_format.record import Record


def shape_key_of(series: Series) -> Hashable:
    """Return the shape key of a series: series with equal keys are assembled and laid out alike.

    None for a series derived from several sites.
    """
    if series.derivation is not None:
        return None
    kind = _kind(port_of(series.site))
    if isinstance(series.firings, Firings) and (form := series.firings.shape_key) is not None:
        return kind, form
    return kind, *map(_form, series.firings)


@lru_cache
def _kind(port: str) -> tuple[bool, bool]:
    return is_parameter(f":{port}"), is_mask(f":{port}")


def _form(firing: Firing) -> Hashable:
    records = firing.records
    if len(records) == 1:
        return _signature(records[0])
    hashes = [record.hash for record in records]  # whether ranks hold equal bytes decides how they are merged
    return *map(_signature, records), tuple(None if h is None else hashes.index(h) for h in hashes)


def _signature(record: Record) -> Hashable:
    return record.key[1:], record.dtype, record.shape, record.dims, record.rows, record.slice


def is_template(wholes: Sequence[AssembledTensor], series: Series) -> bool:
    """Return whether :class:`WholesLike` can assemble other series with the same key on the model of this one."""
    return len(wholes) == len(series.firings) and all(
        whole.records == firing.records and not whole.replicas and _is_simple(whole.piece)
        for whole, firing in zip(wholes, series.firings, strict=True)
    )


def _is_simple(piece: Piece | None) -> bool:
    if isinstance(piece, Summed):  # summands with equal hashes may be replicas, depending on their statistics
        hashes = [record.hash for record in leaves(piece)]
        return len(set(hashes)) == len(hashes) and all(isinstance(part, Leaf) for part in piece.parts)
    return isinstance(piece, Leaf) or (isinstance(piece, Concatenated) and all(map(_is_simple, piece.parts)))


class WholesLike(Sequence[AssembledTensor]):
    """The assembled firings of a series, derived lazily from those of another series with the same key, and cached."""

    def __init__(self, wholes: Sequence[AssembledTensor], series: Series) -> None:
        self._like, self._firings = wholes, series.firings
        self._made: dict[int, AssembledTensor] = {}

    @overload
    def __getitem__(self, index: int) -> AssembledTensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[AssembledTensor, ...]: ...
    def __getitem__(self, index: int | slice) -> AssembledTensor | tuple[AssembledTensor, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        whole = self._made.get(index)
        if whole is None:
            whole = self._made[index] = _whole_like(self._like[index], self._firings[index])
        return whole

    def __len__(self) -> int:
        return len(self._like)


def _whole_like(whole: AssembledTensor, firing: Firing) -> AssembledTensor:
    """Return the assembled tensor of a firing, modeled on ``whole`` from another series with the same key."""
    records = firing.records
    if isinstance(whole.piece, Leaf) and len(records) == 1:
        return AssembledTensor(whole.run, records, Leaf(records[0]), whole.dims, "", (), whole.notes, whole.warnings)
    assert whole.piece is not None
    instead = {id(old): new for old, new in zip(whole.records, records, strict=True)}
    return structs.replace(whole, records=records, piece=_instead(whole.piece, instead))


def _instead(piece: Piece, records: Mapping[int, Record]) -> Piece:
    if isinstance(piece, Leaf):
        return Leaf(records[id(piece.record)], piece.is_vector)
    assert isinstance(piece, Concatenated | Summed)
    return structs.replace(piece, parts=tuple(_instead(part, records) for part in piece.parts))
