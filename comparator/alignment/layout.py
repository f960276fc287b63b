"""Layout: which axes of a tensor are its token rows, according to its dims or to the step's token grid."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.runs.grids import SideRows, StepRows
from tapscope.core.dims import Dims
from tapscope.core.site import is_parameter, port_of

Array = np.ndarray[Any, Any]


class Layout(Struct, frozen=True):
    """The axes of a site that hold its token rows; the same for all firings of the site."""

    axes: tuple[int, ...] = ()
    """Axes that hold the token grid, in tensor order; empty when the tensor is compared whole."""
    source: str = "whole"
    """``annotated`` by dims, ``inferred`` from the grid, or ``whole`` if there are no token rows."""
    sequence_first: bool = False
    """Sequence axis before batch axis: row s * B + b is slot b * S + s."""
    broadcast: bool = False
    """One sequence represents every sequence of the batch."""
    has_key_axis: bool = False
    """Attention weights ``[batch, heads, queries, keys]``, whose columns are tokens too: see
    :mod:`.attention_weight_rows`."""
    has_cached_rows: bool = False
    """The second axis covers all positions of the step's KV cache; the step's own rows come last."""
    problem: str = ""
    """Why the annotation is invalid; the site is then not compared."""

    @property
    def by_rows(self) -> bool:
        """Whether the tensor has token rows."""
        return bool(self.axes)


def layout_of(site: str, wholes: Sequence[AssembledTensor], steps: SideRows) -> Layout:
    """Return the layout of a site's firings, given the token grids of their steps.

    An inferred layout must fit every firing: a table whose size equals the grid's in one step by chance does not in the
    next.
    """
    placed = [(w, rows) for w in wholes if (rows := steps.of(w.records[0])) is not None]
    if not placed or is_parameter(site):
        return Layout()
    if problem := _outside(placed):
        return Layout(problem=problem)
    dims = placed[0][0].dims
    if dims is not None:
        return _checked(_one_for_all(_annotated(dims), dims, placed), placed)
    distinct = {(whole.shape, rows.grid, whole.records[0].rows): (whole, rows) for whole, rows in placed}
    common = [_inferred(whole, rows) for whole, rows in distinct.values()]
    return next((c for c in common[0] if all(c in other for other in common)), Layout())


def is_mask(site: str) -> bool:
    """Return whether the site is an attention mask, whose key axis covers the batch including padding."""
    return "mask" in port_of(site)


def _outside(placed: Sequence[tuple[AssembledTensor, StepRows]]) -> str:
    """Return an error message if a record names rows outside the grid of its step, otherwise an empty string."""
    for whole, rows in placed:
        for first, count in whole.records[0].rows or ():
            if first < 0 or count < 0 or first + count > rows.num_slots:
                key = whole.records[0].key
                return (
                    f"its rows name slots {first} to {first + count - 1} at step {key.step}, which has {rows.num_slots}"
                )
    return ""


def _annotated(dims: Dims) -> Layout:
    t, b, s = (dims.index(name) for name in ("t", "b", "s"))
    flat = next((i for i, dim in enumerate(dims.dims) if sorted(dim.names) == ["b", "s"] and not dim.sections), None)
    if flat is not None:
        return Layout((flat,), "annotated", sequence_first=dims.dims[flat].names[0] == "s")
    if t is not None:
        return Layout((t,), "annotated")
    if s is None:
        return Layout()
    if b is None:
        return Layout((s,), "annotated")
    keyed = (b, s, dims.index("k"), dims.ndim) == (0, 2, 3, 4)
    return Layout((min(b, s), max(b, s)), "annotated", sequence_first=s < b, has_key_axis=keyed)


def _one_for_all(layout: Layout, dims: Dims, placed: Sequence[tuple[AssembledTensor, StepRows]]) -> Layout:
    """Return the layout, marked as broadcast if the batch axis is missing or of size 1 while the grid has several
    sequences."""
    b, s = dims.index("b"), dims.index("s")
    if s is None or any(b is not None and whole.shape[b] != 1 for whole, _ in placed):
        return layout
    if all(len(rows.grid) == 2 and rows.grid[1] == whole.shape[s] for whole, rows in placed):
        return Layout(layout.axes, "annotated", broadcast=True)
    return layout


def _checked(layout: Layout, placed: Sequence[tuple[AssembledTensor, StepRows]]) -> Layout:
    """Return the layout, or one with a problem if it gives a firing another number of rows than the firing's step
    has."""
    if not layout.by_rows:
        return layout
    for whole, rows in placed:
        count = math.prod([whole.shape[i] for i in layout.axes]) * (rows.grid[0] if layout.broadcast else 1)
        if count != num_rows(whole, rows):
            key = whole.records[0].key
            return Layout(
                problem=f"dims '{whole.dims}' give shape {tuple(whole.shape)} {count} token rows at step {key.step}, "
                f"where the step has {num_rows(whole, rows)}"
            )
    return layout


def _inferred(whole: AssembledTensor, rows: StepRows) -> list[Layout]:
    """Return the layouts that fit this firing, most likely first."""
    shape, expected, subset = whole.shape, num_rows(whole, rows), whole.records[0].rows is not None
    readings = []
    padded = len(rows.grid) == 2
    two = len(shape) >= 2 and shape[0] * shape[1] == expected
    if two and (subset or tuple(shape[:2]) == (rows.grid if padded else (1, expected))):
        readings.append(Layout((0, 1), "inferred"))
    if shape and shape[0] == expected:
        readings.append(Layout((0,), "inferred"))
    if padded and not subset and len(shape) >= 2 and tuple(shape[:2]) == (1, rows.grid[1]):
        readings.append(Layout((0, 1), "inferred", broadcast=True))
    readings = readings if padded else readings[::-1]
    return [*readings, Layout((0, 2), "inferred", has_key_axis=True)] if _may_be_keyed(whole, rows) else readings


def _may_be_keyed(whole: AssembledTensor, rows: StepRows) -> bool:
    """Return whether the tensor has the shape of attention weights: one query per slot of the grid, and at least as
    many keys."""
    batch, length = rows.grid if len(rows.grid) == 2 else (1, rows.num_slots)
    shape, record = whole.shape, whole.records[0]
    fits = len(shape) == 4 and (shape[0], shape[2]) == (batch, length) and shape[3] >= length
    return fits and record.rows is None and not is_mask(record.key.site)


def num_rows(whole: AssembledTensor, rows: StepRows) -> int:
    """Return the number of token rows that the tensor must have."""
    subset = whole.records[0].rows
    return rows.num_slots if subset is None else sum(count for _, count in subset)


def slots_of(whole: AssembledTensor, layout: Layout, rows: StepRows) -> tuple[Array, Array]:
    """Return (grid slots, row indices) of the tensor's rows: two int64 arrays of equal length."""
    subset = whole.records[0].rows
    if subset is not None:
        slots = np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in ((0, 0), *subset)])
        return slots, np.arange(len(slots), dtype=np.int64)
    slots = np.arange(rows.num_slots, dtype=np.int64)
    if layout.broadcast:
        return slots, slots % rows.grid[1]
    if layout.has_cached_rows:
        (_, length), columns = rows.grid, whole.shape[layout.axes[1]]
        return slots, slots // length * columns + columns - length + slots % length
    if layout.sequence_first and len(rows.grid) == 2:
        batch, length = rows.grid
        return slots, (slots % length) * batch + slots // length
    return slots, slots
