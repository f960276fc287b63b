"""Value table of one record."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tapscope.core.errors import ConfigError
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.token_labels import TokenLabels
from tapscope.dashboard.model.value_table import ValueTable
from tapscope.render.row_labels import Place, row_map
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]


class RecordValueTable(ValueTable):
    """All values of one record as rows × columns, read on demand."""

    is_pair = False

    def __init__(self, run: Run, record: Record) -> None:
        """Map the record's payload; raises RunCorruptError."""
        self._run, self._record = run, record
        line = run.steps.get(record.key.step, {}).get(record.key.rank)
        self._rows = row_map(record, line)
        array = np.asarray(run.array(record))
        self._shape, self.num_axes = array.shape, array.ndim
        self._axes = self._rows.axes if self._rows else _row_axes(array.shape)
        self._others = tuple(i for i in range(array.ndim) if i not in self._axes)
        self._view = np.moveaxis(array, self._axes, range(len(self._axes)))
        self._sizes = tuple(array.shape[i] for i in self._axes), tuple(array.shape[i] for i in self._others)
        self.num_rows, self.num_columns = math.prod(self._sizes[0]), math.prod(self._sizes[1])
        self._is_matrix = bool(self._view.flags.c_contiguous)
        if self._is_matrix:
            self._view = self._view.reshape(self.num_rows, self.num_columns)
        self.dtypes = (record.dtype or "", record.dtype or "")
        self._tokens = TokenLabels.of((run,), (line,) if line is not None and self._rows else ())

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Return the rows of the record twice, as baseline and as target."""
        stop = min(row + num_rows, self.num_rows)
        if self._is_matrix:
            values = self._view[row:stop, columns]
        elif len(self._axes) <= 1:
            values = (self._view[row:stop] if self._axes else self._view).reshape(stop - row, -1)[:, columns]
        else:
            values = self._view[np.unravel_index(np.arange(row, stop), self._sizes[0])]
            values = values.reshape(stop - row, self.num_columns)[:, columns]
        return values, values

    def label(self, row: int) -> str:
        """Return ``0:5 #1820 ' the'``: request, position, token id and text.

        Without token rows, return the indices along the row axes.
        """
        if self._rows is None:
            return ",".join(map(str, np.unravel_index(row, self._sizes[0]))) if self._axes else "-"
        place = self._rows.place(row)
        if place is None:
            return "padding"
        return place.label + self._tokens.of_place(place.request, place.position, place.branch)

    def step(self, row: int) -> int:
        """Return the step of the record."""
        return self._record.key.step

    def position(self, row: int) -> tuple[str, int, int]:
        """Return (request, position, branch); padding sorts last."""
        place: Place | None = self._rows.place(row) if self._rows else None
        if place is None:
            return ("\uffff" if self._rows else "", row, 0)
        return place.request, place.position, place.branch

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Return the index of an element in the recorded tensor."""
        at: dict[int, int] = {}
        for axes, sizes, flat in zip((self._axes, self._others), self._sizes, (row, column), strict=True):
            at |= dict(zip(axes, map(int, np.unravel_index(flat, sizes)), strict=True)) if axes else {}
        return tuple(at[i] for i in range(len(self._shape)))

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Return (row, column) of a full tensor index, or validate (row, column). Raises ConfigError.

        For a tensor with two axes, two numbers are a tensor index.
        """
        if len(index) == len(self._shape):
            if any(not 0 <= i < n for i, n in zip(index, self._shape, strict=True)):
                raise ConfigError(f"index {list(index)} is outside the shape {list(self._shape)}")
            return _flat(index, self._axes, self._shape), _flat(index, self._others, self._shape)
        return self._row_column(index)

    def link(self, row: int, column: int) -> str:
        """Return the permalink of an element, or of the tensor if ``column`` is past the end of the row."""
        key = self._record.key
        index = self.index(row, column) if column < self.num_columns else None
        return str(Permalink(self._run.name, key.site, key.step, key.rank, index))

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Return (row, column) of the permalink's index; (0, 0) if the link refers to the whole tensor."""
        return self.place(at.index) if at.index else (0, 0)


def _row_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return all axes before the last one that is longer than 1; empty for a vector, which is a single row."""
    return tuple(range(max((i for i, n in enumerate(shape) if n != 1), default=0)))


def _flat(index: Sequence[int], axes: Sequence[int], shape: Sequence[int]) -> int:
    return int(np.ravel_multi_index([index[i] for i in axes], [shape[i] for i in axes])) if axes else 0
