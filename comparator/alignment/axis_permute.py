"""Axis permutation: match the axes of both sides by name when their orders differ."""

from collections.abc import Sequence
from itertools import chain

from msgspec import structs

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.pieces import Permuted
from tapscope.core.axes import Dim, Dims

Wholes = tuple[AssembledTensor, ...]


def permute_features(left: Wholes, right: Wholes, layouts: tuple[Layout, Layout]) -> tuple[Wholes, Wholes, str]:
    """Reorder the feature axes of one side to match the other; return (baseline, target, problem).

    ``n d`` matches ``d n`` and ``(n*d)``; ``b s h`` matches ``s b h`` where there are no token rows; ``o i`` matches
    ``i o``. Sides with different axis names are left unchanged: names are free, and ``h`` may well be ``n d``.
    """
    dims = left[0].dims, right[0].dims
    if dims[0] is None or dims[1] is None or any(w.piece is None for w in (*left, *right)):
        return left, right, ""
    units = [_features(one, layout) for one, layout in zip(dims, layouts, strict=True) if one is not None]
    names = [[name for i in side for name in _names(one.dims[i])] for side, one in zip(units, dims, strict=True) if one]
    if names[0] == names[1] or sorted(names[0]) != sorted(names[1]):
        return left, right, ""
    for side, (wholes, dim, other) in enumerate(((right, dims[1], names[0]), (left, dims[0], names[1]))):
        order = sorted(units[1 - side], key=lambda i: other.index(_names(dim.dims[i])[0]))
        if [name for i in order for name in _names(dim.dims[i])] == other:
            permuted = tuple(_reordered(w, units[1 - side], order) for w in wholes)
            return (left, permuted, "") if side == 0 else (permuted, right, "")
    return (
        left,
        right,
        f"axes of '{dims[0]}' and '{dims[1]}' were flattened in another order: no order of axes fits both",
    )


def flatten_leading_axes(left: Wholes, right: Wholes, layouts: tuple[Layout, Layout]) -> tuple[Layout, Layout]:
    """Return layouts with the common leading axes as rows, for tensors without token rows if one side flattened the
    remaining axes: ``t n d`` matches ``t (n*d)``."""
    dims = left[0].dims, right[0].dims
    if dims[0] is None or dims[1] is None or any(layout.by_rows for layout in layouts):
        return layouts
    names = [[_names(dim) for dim in one.dims] for one in (dims[0], dims[1])]
    if names[0] == names[1] or list(chain(*names[0])) != list(chain(*names[1])):
        return layouts
    common = next((i for i, (one, two) in enumerate(zip(*names, strict=False)) if one != two), 0)
    if not common or any(w.shape[:common] != left[0].shape[:common] for w in (*left, *right)):
        return layouts
    return Layout(tuple(range(common)), "annotated"), Layout(tuple(range(common)), "annotated")


def _features(dims: Dims, layout: Layout) -> list[int]:
    """Return the axes that are neither token rows nor dummy axes (named ``1``)."""
    return [i for i, dim in enumerate(dims.dims) if i not in layout.axes and dim.names != ("1",)]


def _names(dim: Dim) -> tuple[str, ...]:
    """Return the axis names normalized across runs: ``s`` and ``t`` both name a sequence, and sections count as one
    axis."""
    if dim.sections:
        return ("+".join(dim.names),)
    return tuple("t" if name == "s" else name for name in dim.names)


def _reordered(whole: AssembledTensor, places: Sequence[int], order: Sequence[int]) -> AssembledTensor:
    """Return the tensor with the axes ``order`` moved to the positions ``places``."""
    assert whole.piece is not None
    assert whole.dims is not None
    axes = list(range(len(whole.shape)))
    for place, axis in zip(places, order, strict=True):
        axes[place] = axis
    dims = structs.replace(whole.dims, dims=tuple(whole.dims.dims[i] for i in axes))
    return structs.replace(whole, piece=Permuted(tuple(axes), whole.piece), dims=dims)
