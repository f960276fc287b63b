"""Shards: concatenate the parts of one axis, undoing the order in which they were distributed."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from tapscope.comparator.assembly.pieces import Concatenated, Piece, Sliced
from tapscope.core.axes import Dim

Pairs = list[tuple[Piece, Piece]]
"""Pairs of pieces that must hold equal values."""


class AssemblyError(Exception):
    """A firing cannot be assembled; the message says why, and what would help."""


class MissingShardsError(AssemblyError):
    """Shards of a firing are missing; the present ones are consistent."""


def deinterleave(parts: Sequence[Piece], axis: int, lengths: Sequence[int], *, zigzag: bool) -> Piece:
    """Return the whole tensor, given parts over which each of several sequences was distributed.

    Of R parts, part r holds chunk r of R of every sequence, or with ``zigzag`` chunks r and 2R-1-r of 2R. Zigzag is the
    balanced split of causal attention (Ring Attention with load balancing, as in Megatron-core's
    ``get_batch_on_this_cp_rank``). For a length that is not divisible, chunks follow ``torch.chunk`` or
    ``numpy.array_split``, whichever gives the sizes of the parts. Elements beyond the sequences are padding and go to
    the end. Raises AssemblyError if neither or both splits fit.
    """
    num = len(parts)
    owners = [*range(num), *reversed(range(num))] if zigzag else list(range(num))
    fitting: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    for split in (_ceiling, _balanced):
        cuts, used = _cuts(owners, [split(length, len(owners)) for length in lengths])
        tails = [part.shape[axis] - end for part, end in zip(parts, used, strict=True)]
        if len(set(tails)) == 1 and tails[0] >= 0:
            fitting[tuple(cuts)] = used
    exact = {cuts: used for cuts, used in fitting.items() if used == [p.shape[axis] for p in parts]} or fitting
    if len(exact) != 1:
        sizes = ", ".join(str(part.shape[axis]) for part in parts)
        how = "more than one way" if exact else "no way"
        raise AssemblyError(
            f"{how} of distributing {_count(lengths)} over {num} ranks gives shards of {sizes}: "
            "check the order (zigzag or natural) and the axis"
        )
    ((chosen, used),) = exact.items()
    pieces: list[Piece] = [Sliced(axis, start, stop, parts[owner]) for owner, start, stop in chosen]
    pieces += [Sliced(axis, end, p.shape[axis], p) for p, end in zip(parts, used, strict=True) if end < p.shape[axis]]
    return Concatenated(axis, tuple(pieces or parts))


def _ceiling(length: int, chunks: int) -> list[int]:
    size = math.ceil(length / chunks)
    return [max(0, min(size, length - i * size)) for i in range(chunks)]


def _balanced(length: int, chunks: int) -> list[int]:
    return [length // chunks + (i < length % chunks) for i in range(chunks)]


def _cuts(owners: Sequence[int], sequences: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return ((part, start, stop) in the order of the whole, number of used elements of each part)."""
    used = [0] * (max(owners) + 1)
    cuts: list[tuple[int, int, int]] = []
    for sizes in sequences:
        for owner, size in zip(owners, sizes, strict=True):
            start = used[owner]
            used[owner] += size
            if cuts and cuts[-1][0] == owner and cuts[-1][2] == start:
                cuts[-1] = (owner, cuts[-1][1], start + size)
            elif size:
                cuts.append((owner, start, start + size))
    return cuts, used


def _count(lengths: Sequence[int]) -> str:
    return f"a sequence of {lengths[0]}" if len(lengths) == 1 else f"{len(lengths)} sequences of {sum(lengths)} in all"


def ungroup(piece: Piece, axis: int, dim: Dim, share: int) -> Piece:
    """Return a shard that holds ``1/share`` of the groups of ``dim``, with equal sections of all its groups
    concatenated."""
    if not dim.groups:
        return piece
    if dim.groups % share:
        raise AssemblyError(f"{dim.groups} groups of '{dim}' do not divide by {share} ranks")
    here, size = dim.groups // share, piece.shape[axis]
    bounds = _bounds(dim, size, here)
    parts = [
        Sliced(axis, group * (size // here) + start, group * (size // here) + stop, piece)
        for start, stop in bounds
        for group in range(here)
    ]
    return Concatenated(axis, tuple(parts))


def concat_shards(parts: Sequence[Piece], axis: int, dim: Dim, *, copies: bool) -> tuple[Piece, Pairs]:
    """Return (parts joined section by section, pairs of copies that must be equal).

    ``copies``: neighboring ranks may hold copies of one shard.
    """
    if not dim.sections and (dim.size is None or dim.size.copies == 1 or not copies):
        return Concatenated(axis, tuple(parts)), []
    bounds = [_bounds(dim, part.shape[axis], copies=copies) for part in parts]
    pieces: list[Piece] = []
    equal: Pairs = []
    for index, size in enumerate(_sizes(dim)):
        each = size[1] if copies else 1
        if len(parts) % each:
            raise AssemblyError(f"{each} copies in '{dim}' do not divide the {len(parts)} ranks that hold them")
        cuts = [_cut(axis, *bound[index], part) for bound, part in zip(bounds, parts, strict=True)]
        for first in range(0, len(cuts), each):
            pieces.append(cuts[first])
            equal += [(cuts[first], other) for other in cuts[first + 1 : first + each]]
    return Concatenated(axis, tuple(pieces)), equal


def _cut(axis: int, start: int, stop: int, part: Piece) -> Piece:
    return part if (start, stop) == (0, part.shape[axis]) else Sliced(axis, start, stop, part)


def _sizes(dim: Dim) -> list[tuple[int, int]]:
    """Return (weight, copies) of each section, or of the axis itself if it has no sections."""
    if not dim.sections:
        return [(dim.size.whole, dim.size.copies) if dim.size else (1, 1)]
    return [(s.size.whole, s.size.copies) if s.size else (1, 1) for s in dim.sections]


def _bounds(dim: Dim, size: int, groups: int = 1, *, copies: bool = False) -> list[tuple[int, int]]:
    """Return (start, stop) of each section within a shard, or within one of its groups."""
    weights = [whole * (each if copies else 1) for whole, each in _sizes(dim)]
    total = sum(weights) * groups
    if any(size * weight % total for weight in weights):
        per = f"{groups} groups of " if groups > 1 else ""
        raise AssemblyError(f"a shard of {size} does not divide into {per}the sections of '{dim}'")
    return list(pairwise(accumulate((size * weight // total for weight in weights), initial=0)))


def crop(piece: Piece, axis: int, dim: Dim, note: Callable[[str], None]) -> Piece:
    """Return the piece cropped to the size declared by ``dim``, reporting dropped padding through ``note``."""
    declared = dim.size.whole if dim.size else sum(s.size.whole for s in dim.sections if s.size)
    size = piece.shape[axis]
    if not declared or declared == size:
        return piece
    if size < declared or dim.sections:
        raise AssemblyError(f"'{dim}' has size {declared}, but its shards have {size} in total")
    note(f"{size - declared} of {size} along '{dim}' are padding and were left out")
    return Sliced(axis, 0, declared, piece)
