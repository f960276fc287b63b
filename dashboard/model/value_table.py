"""ValueTable: all values of a recorded tensor, or of both sides of a finding, as rows × columns read on demand.

Token rows are the rows where they are known; else the last axis longer than 1 is the width, and the axes before it are
rows. Every method reads only the rectangle that it is asked for, except :attr:`ValueTable.row_errors`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from tapscope.comparator import Finding
from tapscope.comparator.metrics.detail import common_dtype
from tapscope.comparator.pair_analysis.token_view import PairReader
from tapscope.core.errors import ConfigError
from tapscope.dashboard.model.elementwise import as_float64, magnitudes
from tapscope.dashboard.model.finding import link_of
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.token_labels import TokenLabels
from tapscope.render.row_labels import Place, row_map
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run

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
        """Nothing."""
        return ""

    def step(self, row: int) -> int:
        """-1"""
        return -1

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Nothing."""
        return ()

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Every index is outside."""
        return self._row_column(index)

    def link(self, row: int, column: int) -> str:
        """Nothing."""
        return ""

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Every element is outside."""
        return self._row_column(at.index or ())


class RecordValueTable(ValueTable):
    """All values of one record."""

    is_pair = False

    def __init__(self, run: Run, record: Record) -> None:
        """Maps the record's payload; raises RunCorruptError."""
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
        self._tokens = TokenLabels.of((run,), (line.info,) if line is not None and self._rows else ())

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """The rows of the record, as baseline and as target."""
        stop = min(row + num_rows, self.num_rows)
        if self._is_matrix:
            found = self._view[row:stop, columns]
        elif len(self._axes) <= 1:
            found = (self._view[row:stop] if self._axes else self._view).reshape(stop - row, -1)[:, columns]
        else:
            found = self._view[np.unravel_index(np.arange(row, stop), self._sizes[0])]
            found = found.reshape(stop - row, self.num_columns)[:, columns]
        return found, found

    def label(self, row: int) -> str:
        """``0:5 #1820 ' the'`` for position 5 of request 0, its token's id and text; else the indices along
        the row axes."""
        if self._rows is None:
            return ",".join(map(str, np.unravel_index(row, self._sizes[0]))) if self._axes else "-"
        place = self._rows.place(row)
        if place is None:
            return "padding"
        return place.label + self._tokens.of_place(place.request, place.position, place.branch)

    def step(self, row: int) -> int:
        """Step of the record."""
        return self._record.key.step

    def position(self, row: int) -> tuple[str, int, int]:
        """Request, position and branch; padding sorts last."""
        place: Place | None = self._rows.place(row) if self._rows else None
        if place is None:
            return ("\uffff" if self._rows else "", row, 0)
        return place.request, place.position, place.branch

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Index in the recorded tensor."""
        at: dict[int, int] = {}
        for axes, sizes, flat in zip((self._axes, self._others), self._sizes, (row, column), strict=True):
            at |= dict(zip(axes, map(int, np.unravel_index(flat, sizes)), strict=True)) if axes else {}
        return tuple(at[i] for i in range(len(self._shape)))

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """An index along every axis; for other than two axes also a row and a column."""
        if len(index) == len(self._shape):
            if any(not 0 <= i < n for i, n in zip(index, self._shape, strict=True)):
                raise ConfigError(f"index {list(index)} is outside the shape {list(self._shape)}")
            return _flat(index, self._axes, self._shape), _flat(index, self._others, self._shape)
        return self._row_column(index)

    def link(self, row: int, column: int) -> str:
        """Permalink of an element; of the tensor where the row ends before ``column``."""
        key = self._record.key
        index = self.index(row, column) if column < self.num_columns else None
        return str(Permalink(self._run.name, key.site, key.step, key.rank, index))

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """The element of the index, of the whole tensor the first one."""
        return self.place(at.index) if at.index else (0, 0)


class PairValueTable(ValueTable):
    """All values that were read of a finding, on both sides; rows with equal hashes are not included."""

    is_pair = True

    def __init__(self, reader: PairReader, link: Permalink, tokens: TokenLabels) -> None:
        """``link`` is that of the finding; ``tokens`` are those of the target."""
        self._reader, self._link, self._tokens = reader, link, tokens
        self.num_rows, self.num_columns, self.dtypes = reader.num_rows, reader.width, reader.dtypes

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Both sides of rows of one step."""
        return self._reader.chunk(row, num_rows, columns)

    def label(self, row: int) -> str:
        """``0:5 #1820 ' the'`` for position 5 of request 0, its token's id and text; else the index of the
        row in its step."""
        place, label = self._reader.token_place(row), self._reader.labels[row]
        return label if place is None else label + self._tokens.of_place(*place)

    def position(self, row: int) -> tuple[str, int, int]:
        """Request, position and branch; without token rows the index of the row in its step."""
        return self._reader.token_place(row) or ("", int(self._reader.labels[row]), 0)

    def step(self, row: int) -> int:
        """Step of the target."""
        return int(self._reader.steps[row])

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Index in the target's tensor, assembled from all ranks."""
        return self._reader.target_index(row, column)

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """A row and a column of the table."""
        return self._row_column(index)

    def link(self, row: int, column: int) -> str:
        """Permalink of the target's element, in the record of the lowest rank that has it."""
        rank, index = self._reader.recorded_index(row, column)
        rank = self._link.rank if rank < 0 else rank
        return str(Permalink(self._link.run, self._link.site, self.step(row), rank, index or None))

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Looks through the rows of the step, then through the columns of those that agree along the axes of rows."""
        rows = np.flatnonzero(np.asarray(self._reader.steps) == at.step).tolist()
        if not at.index and rows:
            return rows[0], 0
        first = np.array([self._reader.recorded_index(row, 0)[1] for row in rows], np.int64)
        if at.index and first.ndim == 2 and first.shape[1] == len(at.index):
            axes = (first != first[0]).any(0)  # of the rows; where there is one row, every column is looked at
            copy: tuple[int, int] | None = None
            for i in np.flatnonzero((first == at.index)[:, axes].all(1)).tolist():
                for column in range(self.num_columns):
                    rank, index = self._reader.recorded_index(rows[i], column)
                    if (rank, index) == (at.rank, at.index):
                        return rows[i], column
                    copy = copy or ((rows[i], column) if index == at.index else None)
            if copy is not None:  # the rank holds the same as a lower one
                return copy
        raise ConfigError(f"{at} is not among the values that differ")


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
        row, column = self._table.place(index)
        return row * self._lines + column // LINE_COLUMNS, column % LINE_COLUMNS

    def link(self, row: int, column: int) -> str:
        """Permalink of an element."""
        return self._table.link(*self._at(row, column))

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Line and column of the element."""
        row, column = self._table.place_of(at)
        return row * self._lines + column // LINE_COLUMNS, column % LINE_COLUMNS


def folded(table: ValueTable) -> ValueTable:
    """The table itself; split into lines where it is a vector of a single run longer than one line, or its rows exceed
    :data:`BLOCK` columns."""
    return FoldedValueTable(table) if table.num_columns > (LINE_COLUMNS if table.num_axes == 1 else BLOCK) else table


def finding_table(
    finding: Finding, reader: PairReader | None, names: tuple[str, str], tokens: TokenLabels
) -> ValueTable | None:
    """All values of a finding; None where nothing had to be read. ``names`` are those of baseline and target."""
    if reader is None or not reader.num_rows:
        return None
    return folded(PairValueTable(reader, replace(link_of(finding, names), index=None), tokens))


def _are_alike(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether chunks have rows of the same width and dtypes, so that they can be joined."""
    return all(a.shape[1] == b.shape[1] and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def _joined(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([left for left, _ in parts]), np.concatenate([right for _, right in parts])


def _row_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """All axes before the last one that is longer than 1; of a vector none: it is one row."""
    return tuple(range(max((i for i, n in enumerate(shape) if n != 1), default=0)))


def _flat(index: Sequence[int], axes: Sequence[int], shape: Sequence[int]) -> int:
    return int(np.ravel_multi_index([index[i] for i in axes], [shape[i] for i in axes])) if axes else 0


def parse_index(text: str) -> tuple[int, ...]:
    """``[3, 17]`` or ``3,17``; raises ConfigError."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(" ", "").split(",")
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise ConfigError(f"invalid index {text!r}: expected numbers from 0, e.g. [3,17]")
    return tuple(map(int, words))
