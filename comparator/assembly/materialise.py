"""Turn the firings of a recorded or derived series into whole tensors, lazily, as pieces."""

from collections.abc import Sequence
from itertools import accumulate

from msgspec import structs

from tapscope.comparator.assembly.assemble import AssembledTensor, assemble
from tapscope.comparator.assembly.pieces import Concatenated, Piece, Sliced, Summed
from tapscope.comparator.runs.derived_tensor import ConcatParts, FusedLayout, FusedPart, SumOfSites
from tapscope.comparator.runs.hints import sections_of
from tapscope.comparator.runs.mesh_coords import MeshCoords
from tapscope.comparator.runs.series import Series
from tapscope.run_format.run import Run


def materialise(run: Run, places: MeshCoords, series: Series) -> list[AssembledTensor]:
    """Return one whole tensor per firing. Problems do not raise, see :attr:`~.assemble.AssembledTensor.problem`."""
    if series.derivation is None:
        return [assemble(run, places, firing) for firing in series.firings]
    sources = [materialise(run, places, one) for one in series.sources]
    recipe = series.derivation
    if isinstance(recipe, FusedPart):
        return [_part(whole, recipe.fused, recipe.index) for whole in sources[0]]
    return [_combined(wholes, recipe) for wholes in zip(*sources, strict=True)]


def _combined(wholes: Sequence[AssembledTensor], recipe: ConcatParts | SumOfSites) -> AssembledTensor:
    first = wholes[0]
    broken = next((w for w in wholes if w.piece is None), None)
    if broken is not None:
        return structs.replace(first, piece=None, problem=broken.problem, lacks_shards=broken.lacks_shards)
    pieces = tuple(w.piece for w in wholes if w.piece is not None)
    axis = recipe.fused.axis % len(first.shape) if isinstance(recipe, ConcatParts) and first.shape else None
    rests = {p.shape if axis is None else (*p.shape[:axis], *p.shape[axis + 1 :]) for p in pieces}
    if len(rests) > 1:
        shapes = ", ".join(str(tuple(p.shape)) for p in pieces)
        return structs.replace(first, piece=None, problem=f"its {len(pieces)} parts have incompatible shapes: {shapes}")
    return structs.replace(
        first,
        records=tuple(r for w in wholes for r in w.records),
        piece=Summed(pieces) if axis is None else Concatenated(axis, pieces),
        replicas=tuple(one for w in wholes for one in w.replicas),
        notes=tuple(dict.fromkeys(note for w in wholes for note in w.notes)),
        warnings=tuple(dict.fromkeys(warning for w in wholes for warning in w.warnings)),
    )


def _part(whole: AssembledTensor, fused: FusedLayout, index: int | None) -> AssembledTensor:
    """Return part ``index`` of a fused tensor; ``index`` None: all parts in plain order."""
    if fused.problem or whole.piece is None:
        return structs.replace(whole, piece=None, problem=whole.problem or fused.problem)
    if not whole.piece.shape:
        return structs.replace(whole, piece=None, problem="a scalar has no parts")
    axis = fused.axis % len(whole.piece.shape)
    width = whole.piece.shape[axis]
    sizes, groups = _sizes(whole, fused, axis)
    if sum(sizes) != width:
        needed = " + ".join(map(str, sizes)) or f"{len(fused.parts)} equal parts"
        problem = f"{whole.records[0].key.site} has {width} features, but {', '.join(fused.parts)} need {needed}"
        return structs.replace(whole, piece=None, problem=problem)
    chosen = range(len(sizes)) if index is None else (index,)
    parts = [_cut(whole.piece, axis, sizes, groups, i) for i in chosen]
    # The dims remain those of the fused tensor, although its sections are now separated.
    return structs.replace(whole, piece=parts[0] if len(parts) == 1 else Concatenated(axis, tuple(parts)))


def _sizes(whole: AssembledTensor, fused: FusedLayout, axis: int) -> tuple[tuple[int, ...], int]:
    """Return (size of each part in the whole, number of groups), from the dims if they state it, else from
    ``fused``."""
    assert whole.piece is not None
    width = whole.piece.shape[axis]
    sections = sections_of(whole.dims.dims[axis]) if whole.dims is not None else ()
    if len(sections) == len(fused.parts):
        known = tuple(s.size.whole for s in sections if s.size is not None)
        return known or (width // len(sections),) * len(sections), 1
    if fused.sizes:
        return fused.sizes, fused.groups
    return ((width // len(fused.parts),) * len(fused.parts), fused.groups) if width % len(fused.parts) == 0 else ((), 1)


def _cut(piece: Piece, axis: int, sizes: Sequence[int], groups: int, index: int) -> Piece:
    """Return part ``index`` of every group, concatenated."""
    per_group = [size // groups for size in sizes]
    start = [0, *accumulate(per_group)][index]
    period = sum(per_group)
    cuts = [_narrowed(piece, axis, g * period + start, g * period + start + per_group[index]) for g in range(groups)]
    return cuts[0] if groups == 1 else Concatenated(axis, tuple(cuts))


def _narrowed(piece: Piece, axis: int, start: int, stop: int) -> Piece:
    """Return ``start:stop`` of a piece, cut from the underlying shards so that each keeps its rank."""
    if (start, stop) == (0, piece.shape[axis]):
        return piece
    if not isinstance(piece, Concatenated) or piece.axis != axis:
        return Sliced(axis, start, stop, piece)
    pieces, first = [], 0
    for part in piece.parts:
        size = part.shape[axis]
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            pieces.append(_narrowed(part, axis, low, high))
        first += size
    return pieces[0] if len(pieces) == 1 else Concatenated(axis, tuple(pieces))
