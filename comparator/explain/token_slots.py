"""Token slots: all rows of a site in one run, each with its request, position and step, padding included."""

import math
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_map import PADDING, RowMap
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import blocks
from tapscope.comparator.assembly.read import read
from tapscope.comparator.explain.sample import Sample
from tapscope.comparator.runs.grids import SideRows

Array = np.ndarray[Any, Any]

MAX_SLOTS = 1 << 13
"""Maximum number of slots of a site."""
MAX_VALUES = 1 << 24
PADDED = -1


class TokenSlots(Struct, frozen=True):
    """The rows of one site in one run, as columns of equal length."""

    pair: Array
    """[n] row pair; negative if the row is not paired."""
    request: Array
    """[n] index of the request; padding has the request of its batch row; -1 if unknown."""
    position: Array
    """[n] position in the request; :data:`PADDED` for padding."""
    step: Array
    slot: Array
    """[n] column in the padded batch."""
    values: Array
    """[n, width] float64."""

    def place(self) -> dict[tuple[int, int, int], int]:
        """Return (step, request, position) -> row index, without padding."""
        keys = zip(self.step.tolist(), self.request.tolist(), self.position.tolist(), strict=True)
        return {key: i for i, key in enumerate(keys) if key[2] != PADDED}


def rows_like(given: TokenSlots, sample: Sample) -> Array | None:
    """Return the values of the sample's rows as [rows, width]; None if any row is missing.

    The steps of a sample are the target's. The baseline may have computed a row in another step; it is then found by
    position.
    """
    at = given.place()
    by_position = {key[1:]: row for key, row in at.items()}
    keys = zip(sample.step.tolist(), sample.request.tolist(), sample.position.tolist(), strict=True)
    indices = np.array([at.get(key, by_position.get(key[1:], -1)) for key in keys], dtype=np.int64)
    return given.values[indices] if indices.min(initial=0) >= 0 else None


def read_token_slots(ready: PreparedPair, row_map: RowMap, side: int) -> TokenSlots | None:
    """Return all rows of one side of a prepared pair; None if there are too many, or if they are not token rows."""
    wholes, layout = (ready.left, ready.right)[side], ready.layouts[side]
    if ready.problem or layout.has_key_axis or layout.broadcast:
        return None
    rows = (row_map.baseline, row_map.target)[side]
    parts = [_of_firing(whole, layout, rows, row_map) for whole in wholes]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known or len({part[-1].shape[1] for part in known}) != 1:
        return None
    if sum(part[-1].size for part in known) > MAX_VALUES or sum(len(part[0]) for part in known) > MAX_SLOTS:
        return None
    return TokenSlots(*(np.concatenate(column) for column in zip(*known, strict=True)))


def _of_firing(whole: AssembledTensor, layout: Layout, rows: SideRows, row_map: RowMap) -> tuple[Array, ...] | None:
    grid = rows.of(whole.records[0])
    if grid is None or whole.piece is None or not whole.has_values or math.prod(whole.piece.shape) > MAX_VALUES:
        return None
    number = grid.num_slots
    values = _values(whole, layout, grid.grid)
    if values is None or len(values) != number or not row_map.num_pairs:
        return None
    lines, length = (grid.grid[0], grid.grid[1]) if len(grid.grid) == 2 else (1, number)
    slot = np.arange(number)
    if layout.sequence_first:
        slot = slot % lines * length + slot // lines
    pair = grid.pairs[slot]
    real = pair >= 0
    request = np.where(real, row_map.pair_request[np.maximum(pair, 0)], -1)
    position = np.where(real, row_map.pair_position[np.maximum(pair, 0)], PADDED)
    if lines > 1:
        line = slot // length
        owner = np.full(lines, -1)
        np.maximum.at(owner, line, request)
        request = np.where(pair == PADDING, owner[line], request)
    step = np.full(number, whole.records[0].key.step)
    return pair, request, position, step, slot % length, values.astype(np.float64)


def _values(whole: AssembledTensor, layout: Layout, grid: tuple[int, ...]) -> Array | None:
    """Return the rows of a tensor as [slots, width]; the tensor may have axes of length 1 within the grid."""
    assert whole.piece is not None
    if layout.has_cached_rows:  # [batch, …, all cached positions, …], with the step's own positions last
        stored = np.moveaxis(np.asarray(read(whole.piece, whole.run)), layout.axes, (0, 1))
        return stored[:, -grid[1] :].reshape(math.prod(grid), -1) if len(grid) == 2 else None
    if layout.by_rows:
        held = blocks(whole.piece, whole.run, layout.axes)
        return np.concatenate([np.asarray(block.rows(slice(0, block.num_rows))) for block in held], axis=1)
    lengths, axis = whole.piece.shape, 0
    for number in grid:
        while axis < len(lengths) - 1 and lengths[axis] == 1 != number:
            axis += 1
        if axis >= len(lengths) - 1 or lengths[axis] != number:
            return None
        axis += 1
    return np.asarray(read(whole.piece, whole.run)).reshape(math.prod(grid), -1)
