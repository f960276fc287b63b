"""Values of a recorded tensor, or of both sides of a finding, as a 2-D table that is read on demand.

Rows are token rows if known; otherwise the last axis longer than 1 is the width, and the axes before it are
flattened to rows. Methods read only the requested rectangle, except :attr:`ValueTable.row_errors`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tapscope.comparator.metrics.detail import common_dtype
from tapscope.core.errors import ConfigError
from tapscope.dashboard.model.elementwise import as_float64, magnitudes
from tapscope.dashboard.model.permalink import Permalink

Array = np.ndarray[Any, Any]

BLOCK = 1 << 18
"""Number of elements converted to float64 at a time (2 MiB)."""
LINE_COLUMNS = 1024
"""Columns per line when a long vector or a very wide row is split."""


class ValueTable(ABC):
    """Table of rows × columns with the values of one run, or of two runs."""

    num_rows: int
    num_columns: int
    dtypes: tuple[str, str]
    """dtypes of baseline and target; equal for a single run."""
    is_pair: bool
    """Whether the table has two runs; if not, baseline and target are the same values."""
    num_axes = -1
    """Number of axes in a tensor index that :meth:`place` accepts; -1 if only (row, column) is accepted."""

    @abstractmethod
    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Return [rows, columns] of baseline and target: at least one row, at most ``num_rows``. Raises
        RunCorruptError.

        All returned rows have the same width, which is smaller than ``num_columns`` if these rows are shorter.
        """

    @abstractmethod
    def label(self, row: int) -> str:
        """Return request and position of a row, or its index."""

    @abstractmethod
    def step(self, row: int) -> int:
        """Return the step of a row."""

    @abstractmethod
    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Return the index of an element in the recorded tensor."""

    @abstractmethod
    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Return (row, column) of a tensor index, or validate an ``index`` that already is (row, column).

        Raises ConfigError.
        """

    @abstractmethod
    def link(self, row: int, column: int) -> str:
        """Return the permalink of an element."""

    @abstractmethod
    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Return (row, column) of the element that a permalink names; inverse of :meth:`link`. Raises ConfigError."""

    def cell_of(self, row: int, column: int) -> tuple[int, int]:
        """Return the table cell that shows ``column`` of row ``row`` of the unfolded table."""
        return row, column

    def position(self, row: int) -> tuple[str, int, int]:
        """Return (request, position, branch) as a sort key for token rows."""
        return "", row, 0

    @property
    def ulp_dtype(self) -> str | None:
        """The coarser dtype of a pair; None for integers and for a single run."""
        return common_dtype(*self.dtypes) if self.is_pair else None

    def chunks(
        self, first: int = 0, stop: int | None = None, columns: slice = slice(None)
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (first row, baseline, target) of the rows from ``first`` to ``stop``, at most BLOCK elements or one row
        each."""
        row, stop = first, self.num_rows if stop is None else stop
        num_columns = len(range(*columns.indices(self.num_columns)))
        most = max(BLOCK // max(num_columns, 1), 1)
        waiting: list[tuple[Array, Array]] = []
        num_waiting = 0
        while row < stop and num_columns:
            part = self.chunk(row, min(most, stop - row), columns)
            if waiting and (num_waiting + len(part[1]) > most or not _are_alike(waiting[0], part)):
                yield row - num_waiting, *_joined(waiting)
                waiting, num_waiting = [], 0
            waiting.append(part)
            num_waiting += len(part[1])
            row += len(part[1])
        if waiting:
            yield row - num_waiting, *_joined(waiting)

    @cached_property
    def row_errors(self) -> tuple[Array, Array]:
        """[rows] float64 twice, read once: relative L2 error and largest |Δ|; for a single run, rms and largest |x|."""
        errors, peaks = np.zeros(self.num_rows), np.zeros(self.num_rows)
        for row, left, right in self.chunks():
            sizes = magnitudes(left, right, is_pair=self.is_pair)
            with np.errstate(all="ignore"):
                norms = np.sqrt((sizes * sizes).sum(1))
                if self.is_pair:
                    a = as_float64(left)
                    scale = np.sqrt((a * a).sum(1))
                else:
                    scale = np.full(len(norms), math.sqrt(max(right.shape[1], 1)))
                errors[row : row + len(norms)] = np.where(norms == 0, 0.0, norms / scale)
            peaks[row : row + len(norms)] = sizes.max(1, initial=0.0)
        return errors, peaks

    def clamped(self, row: int, column: int) -> tuple[int, int]:
        """Clamp row and column to the table."""
        return max(min(row, self.num_rows - 1), 0), max(min(column, self.num_columns - 1), 0)

    def _row_column(self, index: Sequence[int]) -> tuple[int, int]:
        if len(index) != 2:
            size = f"{self.num_rows:,} × {self.num_columns:,}"
            raise ConfigError(
                f"invalid index {list(index)}: expected row, column of {size}, or an index along every axis"
            )
        row, column = index
        if not (0 <= row < self.num_rows and 0 <= column < self.num_columns):
            raise ConfigError(f"[{row},{column}] is outside of {self.num_rows:,} rows × {self.num_columns:,} columns")
        return row, column


class EmptyValueTable(ValueTable):
    """Table without values, a placeholder on a hidden screen that must not keep a run in memory."""

    num_rows = num_columns = 0
    dtypes = ("", "")
    is_pair = False

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Return two arrays of shape [0, 0]."""
        return np.empty((0, 0)), np.empty((0, 0))

    def label(self, row: int) -> str:
        """Return an empty string."""
        return ""

    def step(self, row: int) -> int:
        """Return -1."""
        return -1

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Return an empty tuple."""
        return ()

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Raise ConfigError: every index is outside the table."""
        return self._row_column(index)

    def link(self, row: int, column: int) -> str:
        """Return an empty string."""
        return ""

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Raise ConfigError: every element is outside the table."""
        return self._row_column(at.index or ())


class FoldedValueTable(ValueTable):
    """Table with very wide rows split into lines of :data:`LINE_COLUMNS` columns, so that no whole row is read."""

    def __init__(self, table: ValueTable) -> None:
        self._table, self._lines = table, -(-table.num_columns // LINE_COLUMNS)
        self.num_rows, self.num_columns = table.num_rows * self._lines, LINE_COLUMNS
        self.dtypes, self.is_pair, self.num_axes = table.dtypes, table.is_pair, table.num_axes

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Return lines of a single row; a shorter last line is returned separately."""
        base, line = divmod(row, self._lines)
        num = max(min(num_rows, self._lines - line), 1)
        sides = self._table.chunk(base, 1, slice(line * LINE_COLUMNS, (line + num) * LINE_COLUMNS))
        width = sides[0].shape[1]
        if width < LINE_COLUMNS:
            left, right = sides
        else:
            left, right = (side[:, : width // LINE_COLUMNS * LINE_COLUMNS].reshape(-1, LINE_COLUMNS) for side in sides)
        return left[:, columns], right[:, columns]

    def _at(self, row: int, column: int) -> tuple[int, int]:
        base, line = divmod(row, self._lines)
        return base, line * LINE_COLUMNS + column

    def label(self, row: int) -> str:
        """Return the label of the row, and the number of the line within the row."""
        base, line = divmod(row, self._lines)
        return str(line) if self._table.num_rows == 1 else f"{self._table.label(base)} +{line}"

    def step(self, row: int) -> int:
        """Return the step of the row."""
        return self._table.step(row // self._lines)

    def position(self, row: int) -> tuple[str, int, int]:
        """Return (request, position, branch) of the row."""
        return self._table.position(row // self._lines)

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Return the index in the recorded tensor; empty past the end of the last line."""
        base, at = self._at(row, column)
        return self._table.index(base, at) if at < self._table.num_columns else ()

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Return (line, column) of a tensor index, or validate an ``index`` that already is (line, column)."""
        if len(index) != self.num_axes:
            return self._row_column(index)
        return self.cell_of(*self._table.place(index))

    def cell_of(self, row: int, column: int) -> tuple[int, int]:
        """Return the line, and the column within the line."""
        return row * self._lines + column // LINE_COLUMNS, column % LINE_COLUMNS

    def link(self, row: int, column: int) -> str:
        """Return the permalink of an element."""
        return self._table.link(*self._at(row, column))

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Return (line, column) of the element that a permalink refers to."""
        return self.cell_of(*self._table.place_of(at))


def folded(table: ValueTable) -> ValueTable:
    """Return ``table``, split into lines if its rows are very wide.

    This applies to a single-run vector longer than one line, and to rows of more than :data:`BLOCK` columns.
    """
    return FoldedValueTable(table) if table.num_columns > (LINE_COLUMNS if table.num_axes == 1 else BLOCK) else table


def _are_alike(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Return whether two chunks have equal widths and dtypes, so that they can be concatenated."""
    return all(a.shape[1] == b.shape[1] and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def _joined(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([left for left, _ in parts]), np.concatenate([right for _, right in parts])


def parse_index(text: str) -> tuple[int, ...]:
    """Parse ``[3, 17]`` or ``3,17``; raises ConfigError."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(" ", "").split(",")
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise ConfigError(f"invalid index {text!r}: expected numbers from 0, e.g. [3,17]")
    return tuple(map(int, words))
