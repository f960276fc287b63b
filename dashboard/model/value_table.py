"""ValueTable: all values of a recorded tensor, or of both sides of a finding, as rows × columns read on demand.

Token rows are the rows where they are known; else the last axis longer than 1 is the width, and the axes before it are
rows. Every method reads only the rectangle that it is asked for, except :attr:`ValueTable.row_errors`.
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
"""Elements converted to float64 at a time (2 MiB)."""
LINE_COLUMNS = 1024
"""Columns of a line of a long vector or a very wide row."""


class ValueTable(ABC):
    """Rows × columns of one run, or of two runs side by side."""

    num_rows: int
    num_columns: int
    dtypes: tuple[str, str]
    """Of baseline and target; the same where there is one run."""
    is_pair: bool
    """Whether there are two runs; if not, baseline and target are the same values."""
    num_axes = -1
    """Of the tensor whose indices :meth:`place` takes; -1 for a row and a column alone."""

    @abstractmethod
    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """[rows, columns] of baseline and target, at most ``num_rows``, at least one; raises RunCorruptError.

        All have the same width, which is below that of the table where these rows are shorter.
        """

    @abstractmethod
    def label(self, row: int) -> str:
        """Request and position of a row, or its index."""

    @abstractmethod
    def step(self, row: int) -> int:
        """Step of a row."""

    @abstractmethod
    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Index of an element in the recorded tensor."""

    @abstractmethod
    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Row and column of an index of the tensor, or of a row and a column; raises ConfigError."""

    @abstractmethod
    def link(self, row: int, column: int) -> str:
        """Permalink of an element."""

    @abstractmethod
    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Row and column of the element that a link names, the inverse of :meth:`link`; raises ConfigError."""

    def cell_of(self, row: int, column: int) -> tuple[int, int]:
        """Where the table shows a column of a row of the tensor."""
        return row, column

    def position(self, row: int) -> tuple[str, int, int]:
        """Request, position and branch, to sort rows by."""
        return "", row, 0

    @property
    def ulp_dtype(self) -> str | None:
        """The coarser dtype of a pair; None for integers and for one run."""
        return common_dtype(*self.dtypes) if self.is_pair else None

    def chunks(
        self, first: int = 0, stop: int | None = None, columns: slice = slice(None)
    ) -> Iterator[tuple[int, Array, Array]]:
        """(first row, baseline, target) of the rows from ``first`` to ``stop``: at most BLOCK elements, or one row."""
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
        """[rows] float64, read once: the relative L2 error (of one run the rms), and the largest |Δ| (or |x|)."""
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
        """The nearest row and column of the table."""
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
    """No values: what a screen holds while it is not shown, so that no run stays in memory."""

    num_rows = num_columns = 0
    dtypes = ("", "")
    is_pair = False

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """[0, 0]"""
        return np.empty((0, 0)), np.empty((0, 0))

    def label(self, row: int) -> str:
        """Empty."""
        return ""

    def step(self, row: int) -> int:
        """-1"""
        return -1

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Empty."""
        return ()

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Every index is outside."""
        return self._row_column(index)

    def link(self, row: int, column: int) -> str:
        """Empty."""
        return ""

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Every element is outside."""
        return self._row_column(at.index or ())


class FoldedValueTable(ValueTable):
    """A table with very wide rows, each split into lines of :data:`LINE_COLUMNS`, so that no row is read as a whole."""

    def __init__(self, table: ValueTable) -> None:
        self._table, self._lines = table, -(-table.num_columns // LINE_COLUMNS)
        self.num_rows, self.num_columns = table.num_rows * self._lines, LINE_COLUMNS
        self.dtypes, self.is_pair, self.num_axes = table.dtypes, table.is_pair, table.num_axes

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Lines of one row; if its last line is shorter, it is returned on its own."""
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
        """Label of the row and number of the line within it."""
        base, line = divmod(row, self._lines)
        return str(line) if self._table.num_rows == 1 else f"{self._table.label(base)} +{line}"

    def step(self, row: int) -> int:
        """Step of the row."""
        return self._table.step(row // self._lines)

    def position(self, row: int) -> tuple[str, int, int]:
        """Request, position and branch of the row."""
        return self._table.position(row // self._lines)

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Index in the recorded tensor; empty beyond the last line's end."""
        base, at = self._at(row, column)
        return self._table.index(base, at) if at < self._table.num_columns else ()

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """An index of the tensor, or a line and a column."""
        if len(index) != self.num_axes:
            return self._row_column(index)
        return self.cell_of(*self._table.place(index))

    def cell_of(self, row: int, column: int) -> tuple[int, int]:
        """Line and column of the line."""
        return row * self._lines + column // LINE_COLUMNS, column % LINE_COLUMNS

    def link(self, row: int, column: int) -> str:
        """Permalink of an element."""
        return self._table.link(*self._at(row, column))

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Line and column of the element."""
        return self.cell_of(*self._table.place_of(at))


def folded(table: ValueTable) -> ValueTable:
    """The table itself; split into lines where it is a vector of a single run longer than one line, or its rows exceed
    :data:`BLOCK` columns."""
    return FoldedValueTable(table) if table.num_columns > (LINE_COLUMNS if table.num_axes == 1 else BLOCK) else table


def _are_alike(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether chunks have rows of the same width and dtypes, so that they can be joined."""
    return all(a.shape[1] == b.shape[1] and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def _joined(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([left for left, _ in parts]), np.concatenate([right for _, right in parts])


def parse_index(text: str) -> tuple[int, ...]:
    """``[3, 17]`` or ``3,17``; raises ConfigError."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(" ", "").split(",")
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise ConfigError(f"invalid index {text!r}: expected numbers from 0, e.g. [3,17]")
    return tuple(map(int, words))
