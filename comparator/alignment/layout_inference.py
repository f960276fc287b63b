"""Layout inference: find the token rows of tensors without dims from the shapes of both sides.

``[batch, heads, sequence, d]`` does not begin with the step's grid, but only one of its layouts is compatible with
``[tokens, heads * d]`` of the other run. Ambiguous shapes are not guessed: the error message lists the possible
annotations.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

from msgspec import structs

from tapscope.comparator.alignment.layout import Layout, is_mask
from tapscope.comparator.alignment.row_map import PADDING
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.runs.grids import SideRows, StepRows
from tapscope.core.site import is_parameter

MAX_AXES = 6
"""Largest number of axes for which layouts are inferred."""

_Layouts = tuple[Layout, Layout]
_Wholes = tuple[Sequence[AssembledTensor], Sequence[AssembledTensor]]


def infer_layouts(layouts: _Layouts, wholes: _Wholes, rows: tuple[SideRows, SideRows]) -> _Layouts:
    """Return the layouts of both sides, replaced by inferred ones if exactly one combination fits both; annotations are
    kept.

    If several combinations fit equally well, :attr:`~.layout.Layout.problem` is set on each side that needs an
    annotation.
    """
    if layouts[0].has_key_axis != layouts[1].has_key_axis:
        left, right = (_without_keys(layout) for layout in layouts)
        layouts = left, right
    if any(layout.problem for layout in layouts) or not all(rows) or layouts[0].has_key_axis:
        return layouts
    firsts = [(layout, side[0], known) for layout, side, known in zip(layouts, wholes, rows, strict=True)]
    unclear = [_is_unclear(layout, whole) or _is_per_sequence(layout, whole, known) for layout, whole, known in firsts]
    if not any(unclear) and _fit(layouts, wholes):
        return layouts
    if all(unclear) and len({whole.shape for side in wholes for whole in side}) == 1:
        return Layout(), Layout()  # equal shapes, whichever axis holds the tokens
    if is_mask(wholes[0][0].records[0].key.site):
        return Layout(), Layout()
    if all(_is_fixed(layout, side[0]) for layout, side in zip(layouts, wholes, strict=True)):
        return layouts
    candidates = [_candidates(*one) for one in zip(layouts, wholes, rows, strict=True)]
    best = _usual(_likeliest(candidates, wholes))
    num_known = sum(layout.by_rows for layout in layouts)
    if not best and (num_known == 1 or (num_known == 0 and (_are_padded(wholes, rows) or _differ_in_shape(wholes)))):
        more = [
            mine or _cached(*one) for mine, one in zip(candidates, zip(layouts, wholes, rows, strict=True), strict=True)
        ]
        best = _likeliest(more, wholes)
    if len(best) == 1:
        return best[0]
    if not best or not any(layout.by_rows for layout in layouts):
        return layouts
    return _doubtful(layouts, best, wholes)


def _are_padded(wholes: _Wholes, rows: tuple[SideRows, SideRows]) -> bool:
    """Return whether a grid of either side holds padding. Values of padding are undefined, so such tensors cannot be
    compared whole."""
    return any(
        grid is not None and bool((grid.pairs == PADDING).any())
        for side, known in zip(wholes, rows, strict=True)
        for grid in (known.of(whole.records[0]) for whole in side)
    )


def _differ_in_shape(wholes: _Wholes) -> bool:
    """Return whether the shapes of the firings differ between the sides, so that not all of them can be compared
    whole."""
    left, right = ([whole.shape for whole in side] for side in wholes)
    return left != right


def _likeliest(candidates: Sequence[Sequence[Layout]], wholes: _Wholes) -> list[_Layouts]:
    """Return the combinations of candidate layouts with the highest :func:`_likeness`; empty if none fits."""
    by_likeness: dict[int, list[_Layouts]] = {}
    for left in candidates[0]:
        for right in candidates[1]:
            by_likeness.setdefault(_likeness((left, right), wholes), []).append((left, right))
    return by_likeness.get(max(by_likeness), []) if max(by_likeness, default=0) else []


def _usual(pairs: list[_Layouts]) -> list[_Layouts]:
    """Drop combinations with features before batch and sequence, unless no others remain.

    ``b h s d`` (attention in transformers) and ``s b h`` (Megatron) are in use, ``h b s d`` is not.
    """
    usual = [pair for pair in pairs if all(layout.axes[:1] == (0,) for layout in pair)]
    return usual or pairs


def _without_keys(layout: Layout) -> Layout:
    """Drop the key axis of an annotated layout; replace a layout inferred from attention weights by ``Layout()``."""
    return (
        layout
        if not layout.has_key_axis
        else structs.replace(layout, has_key_axis=False)
        if layout.source == "annotated"
        else Layout()
    )


def _is_unclear(layout: Layout, whole: AssembledTensor) -> bool:
    """Return whether ``[batch, sequence, heads, d]`` was inferred although ``[batch, heads, sequence, d]`` fits as
    well."""
    shape, last = whole.shape, layout.axes[-1] if layout.axes else 0
    return layout.source == "inferred" and shape[last] != 1 and shape[last] in shape[last + 1 : -1]


def _is_per_sequence(layout: Layout, whole: AssembledTensor, rows: SideRows) -> bool:
    """Return whether the step has one token per sequence but a ``[batch, n, d]`` tensor has n rows per sequence: an
    encoder output, or a tensor that cross-attention derives from it."""
    grid, shape = rows.of(whole.records[0]), whole.shape
    if grid is None or len(grid.grid) != 2 or grid.grid[1] != 1:
        return False
    return layout == Layout((0,), "inferred") and len(shape) > 2 and 1 not in shape[1:]


def _fit(layouts: _Layouts, wholes: _Wholes) -> bool:
    """Return whether both sides have token rows of equal width in every firing."""
    if not all(layout.by_rows for layout in layouts):
        return False
    shapes = [
        (layout, shape) for layout, side in zip(layouts, wholes, strict=True) for shape in {w.shape for w in side}
    ]
    return len({math.prod(_rest(layout, shape)) for layout, shape in shapes}) == 1


def _is_fixed(layout: Layout, whole: AssembledTensor) -> bool:
    """Return whether the dims or the kind of the site leave no layout to infer."""
    return whole.dims is not None or layout.source == "annotated" or is_parameter(whole.records[0].key.site)


def _candidates(layout: Layout, wholes: Sequence[AssembledTensor], rows: SideRows) -> list[Layout]:
    """Return the distinct layouts that fit every firing of one side."""
    if _is_fixed(layout, wholes[0]):
        return [layout] if layout.by_rows else []
    placed = [(w.shape, grid) for w in wholes if (grid := rows.of(w.records[0])) is not None]
    if len(placed) < len(wholes) or any(w.records[0].rows is not None for w in wholes):
        return [layout] if layout.by_rows else []
    distinct = {(shape, grid.grid): grid for shape, grid in placed}
    sets = [set(_readings(shape, grid)) for (shape, _), grid in distinct.items()]
    fitting = sorted(set.intersection(*sets), key=lambda one: (one.axes, one.sequence_first))
    shapes = [shape for shape, _ in distinct]
    alike: dict[object, Layout] = {}
    for one in fitting:
        real = tuple(axis for axis in one.axes if any(shape[axis] != 1 for shape in shapes))
        alike.setdefault((real, one.sequence_first and len(real) > 1), one)
    return list(alike.values())


def _readings(shape: tuple[int, ...], rows: StepRows) -> Iterable[Layout]:
    if len(shape) > MAX_AXES:
        return
    for axis, size in enumerate(shape):
        if size == rows.num_slots:
            yield Layout((axis,), "inferred")
    if len(rows.grid) == 2:
        for one, two in combinations(range(len(shape)), 2):
            if (shape[one], shape[two]) == rows.grid:
                yield Layout((one, two), "inferred")
            if (shape[two], shape[one]) == rows.grid:
                yield Layout((one, two), "inferred", sequence_first=True)


def _cached(layout: Layout, wholes: Sequence[AssembledTensor], rows: SideRows) -> list[Layout]:
    """Return layouts whose second axis grows by the tokens of each step, like a KV cache.

    MLA in transformers passes ``kv_b_proj`` the latents of all positions, ``[batch, 1, positions, rank]``, with the
    step's own positions last.
    """
    placed = [(w.shape, grid.grid) for w in wholes if (grid := rows.of(w.records[0])) is not None]
    if _is_fixed(layout, wholes[0]) or len(placed) < len(wholes) or any(w.records[0].rows is not None for w in wholes):
        return []
    if any(len(grid) != 2 or len(shape) < 3 or shape[0] != grid[0] for shape, grid in placed):
        return []
    axes = range(1, min(len(shape) for shape, _ in placed) - 1)
    return [Layout((0, axis), "inferred", has_cached_rows=True) for axis in axes if _grows(placed, axis)]


def _grows(placed: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], axis: int) -> bool:
    """Return whether each firing extends the previous one by its own tokens, and at least one has earlier positions."""
    before, some = -1, False
    for shape, (_, length) in placed:
        held = shape[axis] - length
        if held < 0 or (held and before >= 0 and held != before):
            return False
        before, some = shape[axis], some or held > 0
    return some


def _likeness(layouts: _Layouts, wholes: _Wholes) -> int:
    """Return 2 if the remaining axes of both sides are equal, 1 if one side has them flattened, 0 if they do not
    fit."""
    rests = [
        {_rest(layout, shape) for shape in {whole.shape for whole in side} if math.prod(shape)}
        for layout, side in zip(layouts, wholes, strict=True)
    ]
    if any(len(rest) != 1 for rest in rests):
        return 0
    (left,), (right,) = rests
    if left == right:
        return 2
    return int(math.prod(left) == math.prod(right) and min(len(left), len(right)) <= 1)


def _rest(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the axes that are not token rows, without axes of size 1."""
    return tuple(size for axis, size in enumerate(shape) if axis not in layout.axes and size != 1)


def _doubtful(layouts: _Layouts, best: Sequence[_Layouts], wholes: _Wholes) -> _Layouts:
    """Return the layouts with a problem set on each side whose shape is ambiguous."""
    settled = list(layouts)
    for side, (layout, mine) in enumerate(zip(layouts, wholes, strict=True)):
        ways = list(dict.fromkeys(pair[side] for pair in best))
        if len(ways) > 1:
            readings = " or ".join(f"'{_dims(way, len(mine[0].shape))}'" for way in ways)
            problem = (
                f"shape {tuple(mine[0].shape)} can be read as {readings}: annotate its dims, e.g. --dims GLOB=DIMS"
            )
            settled[side] = structs.replace(layout, problem=problem)
    return settled[0], settled[1]


def _dims(layout: Layout, num_axes: int) -> str:
    """Return the dims annotation that describes this layout."""
    names = dict(
        zip(
            layout.axes,
            ("t",) if len(layout.axes) == 1 else ("s", "b") if layout.sequence_first else ("b", "s"),
            strict=True,
        )
    )
    others = iter("hdefgk")
    return " ".join(names.get(axis) or next(others) for axis in range(num_axes))
