"""ValueTable: all values of a recorded tensor, or of both sides of a finding, as rows × columns read on demand.

Token rows are the rows where they are known; else the last axis longer than 1 is the width, and the axes before it are
rows. Every method reads the rectangle that it answers about; :func:`overview` reads everything once, in blocks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tapscope.comparator.metrics.detail import Histogram as StepHistogram
from tapscope.comparator.metrics.detail import common_dtype, distances
from tapscope.comparator.pair_analysis.token_view import PairReader
from tapscope.core import dtypes
from tapscope.core.errors import ConfigError
from tapscope.core.formatting import number
from tapscope.dashboard.model.number import MISSING, Number, magnitude
from tapscope.dashboard.model.permalink import Permalink
from tapscope.render.row_labels import row_map
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]
V = TypeVar("V")
TokenText = Callable[[int], str]
"""Token id -> how it is shown."""

BLOCK = 1 << 18
"""Elements converted to float64 at a time (2 MiB)."""
_FOLD = 1024
"""Columns of a line of a long vector or a very wide row."""
MAX_ROWS, MAX_COLUMNS = 256, 256
"""Of one tile."""
PROFILE_CELLS = 1000
BINS = 40
MAX_TOKENS = 500
"""Rows of one token strip."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of values as they are shown."""

    first_row: int
    first_column: int
    num_rows: int
    """Rows of the whole table."""
    num_columns: int
    labels: tuple[str, ...]
    """``0:5`` for position 5 of request 0, with its token where that is known; else the index of the row."""
    steps: tuple[int, ...]
    """Target step of each row of a pair."""
    baseline: tuple[tuple[str, ...], ...]
    """Empty where there is one run."""
    target: tuple[tuple[str, ...], ...]
    difference: tuple[tuple[str, ...], ...]
    """target - baseline; exact for integers."""
    shares: tuple[tuple[float | None, ...], ...]
    """|difference|, or |x| of one run, ÷ the largest of the tile, from 0 to 1; null where that is not finite."""


@dataclass(frozen=True, slots=True)
class CellView:
    """One element."""

    row: int
    column: int
    index: str
    """``[r,c]`` in the recorded tensor (of the target); empty where it has none."""
    label: str
    baseline: str
    target: str
    difference: str
    ulps: str
    """Steps of the coarser dtype between both values; ``-`` for integers."""
    link: str


@dataclass(frozen=True, slots=True)
class SharedBin:
    """A bin of several histograms with the same edges."""

    low: float
    high: float
    baseline: int
    target: int
    difference: int
    text: str


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """A channel or a row, or several neighbouring ones, of which it shows the worst."""

    share: float | None
    """Its value ÷ the largest, from 0 to 1; null where a value is not finite."""
    text: str
    at: int
    """The channel or row with that value."""


@dataclass(frozen=True, slots=True)
class Overview:
    """What all values of a table show together."""

    what: str
    """Of the profiles: ``max |Δ|`` of a pair, ``max |x|`` of one run."""
    values: tuple[SharedBin, ...]
    """Values of both sides on the same bins of equal width; their differences are not in it."""
    magnitudes: tuple[SharedBin, ...]
    """|baseline|, |target| and |difference| by powers of two, on the same bins; zeros are left out."""
    channels: tuple[ProfileCell, ...]
    rows: tuple[ProfileCell, ...]
    cosine: Number
    rel_l2: Number
    max_abs: Number
    rms: Number
    equal: Number
    """Percentage of equal elements."""
    ulp_dtype: str
    ulp_median: Number
    ulp_p99: Number
    ulp_max: Number
    num_nonfinite: int
    """Elements that are not finite, on either side."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row of a token strip."""

    row: int
    label: str
    step: int
    error: Number
    """Norm of the row's difference ÷ norm of its baseline; the rms of the row of one run."""
    max_abs: Number
    share: float | None
    """error ÷ the largest finite one; null where it is not finite."""


@dataclass(frozen=True, slots=True)
class TokenStrip:
    """Rows in an order, from :attr:`offset` on."""

    order: str
    """``position`` or ``error``."""
    offset: int
    num_rows: int
    rows: tuple[TokenRow, ...]


class ValueTable:
    """Base of the tables of one run and of two."""

    num_rows: int
    num_columns: int
    dtypes: tuple[str, str]
    """Of baseline and target; the same where there is one run."""
    is_pair: bool
    num_axes = -1
    """Of the tensor whose indices :meth:`place` takes; -1 for a row and a column alone."""

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """[rows, columns] of baseline and target, at most ``num_rows``, at least one; raises RunCorruptError.

        All have the same width, which is below that of the table where these rows are shorter.
        """
        raise NotImplementedError

    def label(self, row: int) -> str:
        """Request and position of a row, or its index."""
        raise NotImplementedError

    def step(self, row: int) -> int:
        """Step of a row."""
        raise NotImplementedError

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Index of an element in the recorded tensor."""
        raise NotImplementedError

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Row and column of an index of the tensor, or of a row and a column; raises ConfigError."""
        raise NotImplementedError

    def link(self, row: int, column: int) -> str:
        """Permalink of an element."""
        raise NotImplementedError

    def position(self, row: int) -> tuple[str, int]:
        """Request and position, to sort rows by."""
        return "", row

    @property
    def ulp_dtype(self) -> str | None:
        """The coarser dtype of a pair; None for integers and for one run."""
        return common_dtype(*self.dtypes) if self.is_pair else None

    def chunks(self, first: int = 0) -> Iterator[tuple[int, Array, Array]]:
        """(first row, baseline, target) of the rows from ``first`` on, at most BLOCK elements or one row each."""
        row, most = first, max(BLOCK // max(self.num_columns, 1), 1)
        while row < self.num_rows and self.num_columns:
            left, right = self.chunk(row, most)
            yield row, left, right
            row += len(right)

    def checked(self, row: int, column: int) -> tuple[int, int]:
        """The nearest element that there is."""
        return max(min(row, self.num_rows - 1), 0), max(min(column, self.num_columns - 1), 0)


class RecordTable(ValueTable):
    """All values of one record."""

    is_pair = False

    def __init__(self, run: Run, record: Record, token_text: TokenText | None = None) -> None:
        """Raises RunCorruptError."""
        self._run, self._record = run, record
        line = run.steps.get(record.key.step, {}).get(record.key.rank)
        self._rows, self._token_text = row_map(record, line), token_text
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
        self._tokens: dict[str, dict[int, int]] = _token_ids(line.info) if line is not None and self._rows else {}

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """The same array twice."""
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
        """``0:5 'the'``, or the index of the row."""
        place = self._rows.place(row) if self._rows else None
        if self._rows is None:
            return ",".join(map(str, np.unravel_index(row, self._sizes[0]))) if self._axes else "-"
        if place is None:
            return "padding"
        token = self._tokens.get(place.request, {}).get(place.position)
        return f"{place.request}:{place.position}{_token_label(token, self._token_text)}"

    def step(self, row: int) -> int:
        """The record's."""
        return self._record.key.step

    def position(self, row: int) -> tuple[str, int]:
        """Padding comes last."""
        place = self._rows.place(row) if self._rows else None
        return ("", row) if self._rows is None else ("\uffff", row) if place is None else place[:2]

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Of the recorded tensor."""
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
        return _row_column(index, self)

    def link(self, row: int, column: int) -> str:
        """Of the element."""
        key = self._record.key
        index = self.index(row, column) if column < self.num_columns else None
        return str(Permalink(self._run.name, key.site, key.step, key.rank, index))


class PairTable(ValueTable):
    """All values that were read of a finding, on both sides; rows with equal hashes are not among them."""

    is_pair = True

    def __init__(
        self,
        reader: PairReader,
        link: Permalink,
        tokens: dict[str, dict[int, int]],
        token_text: TokenText | None = None,
    ) -> None:
        """``link`` is that of the finding, without an index; ``tokens`` are request -> position -> id."""
        self._reader, self._link, self._tokens, self._token_text = reader, link, tokens, token_text
        self.num_rows, self.num_columns, self.dtypes = reader.num_rows, reader.width, reader.dtypes

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Of one step at most."""
        return self._reader.chunk(row, num_rows, columns)

    def label(self, row: int) -> str:
        """``0:5 'the'``, or the index of the row within its step."""
        text = self._reader.labels[row]
        request, colon, position = text.rpartition(":")
        token = self._tokens.get(request, {}).get(int(position)) if colon and position.isdecimal() else None
        return f"{text}{_token_label(token, self._token_text)}"

    def position(self, row: int) -> tuple[str, int]:
        """Of the label."""
        request, _, position = self._reader.labels[row].rpartition(":")
        return request, int(position) if position.isdecimal() else row

    def step(self, row: int) -> int:
        """The target's."""
        return int(self._reader.steps[row])

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """In the target's tensor, put together from all ranks."""
        return self._reader.target_index(row, column)

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """A row and a column of the table."""
        return _row_column(index, self)

    def link(self, row: int, column: int) -> str:
        """Of the target's element, in the tensor of a rank that recorded it."""
        rank, index = self._reader.recorded_index(row, column)
        rank = self._link.rank if rank < 0 else rank
        return str(Permalink(self._link.run, self._link.site, self.step(row), rank, index or None))


class FoldedTable(ValueTable):
    """A table with very wide rows, each of which is shown as several lines, so that none is read as a whole."""

    def __init__(self, table: ValueTable) -> None:
        self._table, self._lines = table, -(-table.num_columns // _FOLD)
        self.num_rows, self.num_columns = table.num_rows * self._lines, _FOLD
        self.dtypes, self.is_pair, self.num_axes = table.dtypes, table.is_pair, table.num_axes

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Lines of one row; its last line may be shorter, and then comes alone."""
        base, line = divmod(row, self._lines)
        num = max(min(num_rows, self._lines - line), 1)
        sides = self._table.chunk(base, 1, slice(line * _FOLD, (line + num) * _FOLD))
        width = sides[0].shape[1]
        if width < _FOLD:
            left, right = sides
        else:
            left, right = (side[:, : width // _FOLD * _FOLD].reshape(-1, _FOLD) for side in sides)
        return left[:, columns], right[:, columns]

    def _at(self, row: int, column: int) -> tuple[int, int]:
        base, line = divmod(row, self._lines)
        return base, line * _FOLD + column

    def label(self, row: int) -> str:
        """Of the row, and which of its lines."""
        base, line = divmod(row, self._lines)
        return str(line) if self._table.num_rows == 1 else f"{self._table.label(base)} +{line}"

    def step(self, row: int) -> int:
        """Of the row."""
        return self._table.step(row // self._lines)

    def position(self, row: int) -> tuple[str, int]:
        """Of the row."""
        return self._table.position(row // self._lines)

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Of the element."""
        base, at = self._at(row, column)
        return self._table.index(base, at) if at < self._table.num_columns else ()

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """An index of the tensor, or a line and a column."""
        if len(index) != self.num_axes:
            return _row_column(index, self)
        row, column = self._table.place(index)
        return row * self._lines + column // _FOLD, column % _FOLD

    def link(self, row: int, column: int) -> str:
        """Of the element."""
        return self._table.link(*self._at(row, column))


def folded(table: ValueTable) -> ValueTable:
    """The table, or one with lines of 1,024 columns where its rows are very wide, or it is one long vector."""
    return FoldedTable(table) if table.num_columns > (_FOLD if table.num_axes == 1 else BLOCK) else table


def tile(table: ValueTable, row: int, column: int, num_rows: int, num_columns: int) -> Tile:
    """The rectangle that begins at (row, column), cut at the ends of the table; reads its rows alone."""
    if not table.num_rows or not table.num_columns:
        return Tile(0, 0, table.num_rows, table.num_columns, (), (), (), (), (), ())
    row, column = table.checked(row, column)
    stop = min(row + max(min(num_rows, MAX_ROWS), 1), table.num_rows)
    columns = slice(column, min(column + max(min(num_columns, MAX_COLUMNS), 1), table.num_columns))
    width = columns.stop - column
    sides: list[tuple[Array, Array]] = []
    at = row
    while at < stop:
        left, right = table.chunk(at, stop - at, columns)
        sides.append((left, right))
        at += len(right)
    with np.errstate(all="ignore"):
        deltas = [_difference(left, right) for left, right in sides]
        sizes = [np.abs(_floats(d if table.is_pair else right)) for d, (_, right) in zip(deltas, sides, strict=True)]
    top = max((float(part[np.isfinite(part)].max(initial=0.0)) for part in sizes), default=0.0)
    shares = tuple(
        _padded(tuple((float(v) / top if top else 0.0) if math.isfinite(v) else None for v in line), width, 0.0)
        for part in sizes
        for line in part
    )
    numbers = range(row, stop)
    return Tile(
        row,
        column,
        table.num_rows,
        table.num_columns,
        tuple(map(table.label, numbers)),
        tuple(map(table.step, numbers)),
        tuple(_padded(_texts(line), width, "") for left, _ in sides for line in left) if table.is_pair else (),
        tuple(_padded(_texts(line), width, "") for _, right in sides for line in right),
        tuple(_padded(_delta_texts(line), width, "") for each in deltas for line in each) if table.is_pair else (),
        shares,
    )


def cell(table: ValueTable, row: int, column: int) -> CellView:
    """One element; without values where its row is shorter than the table. Raises ConfigError for an empty table."""
    if not table.num_rows or not table.num_columns:
        raise ConfigError("the tensor has no values")
    row, column = table.checked(row, column)
    left, right = (side[0] for side in table.chunk(row, 1, slice(column, column + 1)))
    if not len(right):
        return CellView(row, column, "", table.label(row), "", "", "", "-", table.link(row, column))
    index = table.index(row, column)
    ulps = "-"
    if table.ulp_dtype is not None:
        steps = distances(left, right, table.ulp_dtype)
        ulps = f"{int(steps[0]):,}" if len(steps) else "-"
    with np.errstate(all="ignore"):
        delta = _delta_texts(_difference(left[None], right[None])[0])[0] if table.is_pair else ""
    return CellView(
        row,
        column,
        f"[{','.join(map(str, index))}]" if index else "",
        table.label(row),
        _texts(left)[0] if table.is_pair else "",
        _texts(right)[0],
        delta,
        ulps,
        table.link(row, column),
    )


def find(
    table: ValueTable, row: int, column: int, direction: int = 1, more_than: float | None = None
) -> tuple[int, int] | None:
    """The next element after (or before) a place in row order: not finite, or with |Δ| > ``more_than``.

    Of one run |x| counts in place of |Δ|. The search does not go around the end. None if there is none.
    """

    def hits(left: Array, right: Array) -> Array:
        with np.errstate(all="ignore"):
            if more_than is None:
                return ~(np.isfinite(_floats(left)) & np.isfinite(_floats(right)))
            size = np.abs(_floats(_difference(left, right) if table.is_pair else right))
            return (size > more_than) | (np.isnan(size) & table.is_pair)

    if not table.num_rows or not table.num_columns:
        return None
    if direction > 0:
        for first, left, right in table.chunks(row):
            found = hits(left, right)
            if first == row:
                found[0, : column + 1] = False
            if found.any():
                at = int(np.argmax(found))
                return first + at // found.shape[1], at % found.shape[1]
        return None
    most = max(BLOCK // max(table.num_columns, 1), 1)
    stop = row + 1
    while stop > 0:
        start = max(stop - most, 0)
        last: tuple[int, int] | None = None
        at = start
        while at < stop:
            left, right = table.chunk(at, stop - at)
            found = hits(left, right)
            if at <= row < at + len(found):
                found[row - at, column:] = False
            if found.any():
                flat = found.size - 1 - int(np.argmax(found.reshape(-1)[::-1]))
                last = at + flat // found.shape[1], flat % found.shape[1]
            at += len(right)
        if last is not None:
            return last
        stop = start
    return None


def largest(table: ValueTable) -> tuple[int, int]:
    """The element with the largest |Δ| of a pair, or the largest |x|; one that is not finite comes first."""
    best, place = -1.0, (0, 0)
    for first, left, right in table.chunks():
        with np.errstate(all="ignore"):
            size = np.abs(_floats(_difference(left, right) if table.is_pair else right))
        if not size.size:
            continue
        size = np.where(np.isfinite(size), size, np.inf)
        at = int(np.argmax(size))
        if float(size.reshape(-1)[at]) > best:
            best, place = float(size.reshape(-1)[at]), (first + at // size.shape[1], at % size.shape[1])
    return place


def token_strip(table: ValueTable, order: str = "position", offset: int = 0, limit: int = MAX_TOKENS) -> TokenStrip:
    """Rows by request and position, or the largest errors first."""
    errors, peaks = _row_errors(table)
    if order == "error":
        rows = np.argsort(-np.nan_to_num(errors, nan=np.inf, posinf=np.inf), kind="stable").tolist()
    else:
        rows = sorted(range(table.num_rows), key=lambda row: (*table.position(row), table.step(row)))
    finite = errors[np.isfinite(errors)]
    top = float(finite.max()) if finite.size else 0.0

    def shown(row: int) -> TokenRow:
        error, peak = float(errors[row]), float(peaks[row])
        is_finite = math.isfinite(error)
        return TokenRow(
            row,
            table.label(row),
            table.step(row),
            Number(error if is_finite else None, number(error)),
            Number(peak if math.isfinite(peak) else None, number(peak)),
            (error / top if top else 0.0) if is_finite else None,
        )

    some = rows[offset : offset + max(min(limit, MAX_TOKENS), 1)]
    return TokenStrip(order, offset, table.num_rows, tuple(map(shown, some)))


def overview(table: ValueTable) -> Overview:
    """Histograms, profiles and metrics of all values; reads them twice."""
    found = _Sums(table)
    for row, left, right in table.chunks():
        found.add(row, left, right)
    return found.result()


class _Sums:
    """What :func:`overview` adds up, in float64."""

    def __init__(self, table: ValueTable) -> None:
        self._table = table
        self._channels = np.zeros(table.num_columns)
        self._channel_bad = np.zeros(table.num_columns, np.bool_)
        self._rows, self._row_bad = np.zeros(table.num_rows), np.zeros(table.num_rows, np.bool_)
        self._octaves: tuple[dict[int, int], ...] = ({}, {}, {})
        self._low, self._high, self._peak = math.inf, -math.inf, 0.0
        self._dot = self._left = self._right = self._delta = 0.0
        self._num = self._equal = self._bad = 0
        self._steps = StepHistogram()

    def add(self, row: int, left: Array, right: Array) -> None:
        table = self._table
        with np.errstate(all="ignore"):
            a, b = _floats(left), _floats(right)
            delta = _floats(_difference(left, right)) if table.is_pair else b
        sound = np.isfinite(a) & np.isfinite(b)
        shown = np.where(sound, np.abs(delta), 0.0)
        end = row + len(b)
        channels = self._channels[: shown.shape[1]]
        np.maximum(channels, shown.max(0, initial=0.0), out=channels)
        self._rows[row:end] = shown.max(1, initial=0.0)
        same = (left == right) | (np.isnan(a) & np.isnan(b))
        odd = ~sound & ~same if table.is_pair else ~sound
        self._channel_bad[: odd.shape[1]] |= odd.any(0)
        self._row_bad[row:end] = odd.any(1)
        a, b = np.where(sound, a, 0.0), np.where(sound, b, 0.0)
        self._num, self._bad = self._num + sound.size, self._bad + int((~sound).sum())
        self._equal += int(same.sum())
        if sound.any():
            picked = np.stack([a[sound], b[sound]])
            self._low, self._high = min(self._low, float(picked.min())), max(self._high, float(picked.max()))
        with np.errstate(over="ignore"):
            self._dot, self._left = self._dot + float((a * b).sum()), self._left + float((a * a).sum())
            self._right, self._delta = self._right + float((b * b).sum()), self._delta + float((shown * shown).sum())
        self._peak = max(self._peak, float(shown.max(initial=0.0)))
        for counts, values in zip(self._octaves, (a, b, shown) if table.is_pair else ((), b, ()), strict=True):
            sizes = np.abs(np.asarray(values, np.float64))
            exponents, amounts = np.unique(np.frexp(sizes[sizes > 0])[1], return_counts=True)
            for exponent, amount in zip((exponents - 1).tolist(), amounts.tolist(), strict=True):
                counts[exponent] = counts.get(exponent, 0) + amount
        if table.ulp_dtype is not None:
            self._steps.add(distances(left, right, table.ulp_dtype))

    def result(self) -> Overview:
        table, pair = self._table, self._table.is_pair
        norm = math.sqrt(self._left) * math.sqrt(self._right)
        ulps = table.ulp_dtype
        steps = (self._steps.percentile(0.5), self._steps.percentile(0.99), self._steps.largest)
        return Overview(
            what="max |Δ|" if pair else "max |x|",
            values=tuple(self._value_bins()),
            magnitudes=tuple(self._octave_bins()),
            channels=_profile(self._channels, self._channel_bad, lambda i: f"channel {i}"),
            rows=_profile(self._rows, self._row_bad, table.label),
            cosine=_fixed(self._dot / norm) if pair and norm else MISSING,
            rel_l2=magnitude(math.sqrt(self._delta / self._left)) if pair and self._left else MISSING,
            max_abs=magnitude(self._peak),
            rms=magnitude(math.sqrt(self._right / max(self._num - self._bad, 1))),
            equal=Number(100 * self._equal / self._num, f"{100 * self._equal / self._num:.1f} %")
            if pair and self._num
            else MISSING,
            ulp_dtype=dtypes.short(ulps) if ulps else "",
            ulp_median=_ulps(steps[0]) if ulps else MISSING,
            ulp_p99=_ulps(steps[1]) if ulps else MISSING,
            ulp_max=_ulps(steps[2]) if ulps else MISSING,
            num_nonfinite=self._bad,
        )

    def _value_bins(self) -> Iterator[SharedBin]:
        low, high = self._low, self._high
        if low > high:
            return
        bins = 1 if low == high else BINS
        counts = np.zeros((2, bins), np.int64)
        span = high / 4 - low / 4
        for _, left, right in self._table.chunks():
            for side, values in enumerate((left, right)):
                if side or self._table.is_pair:
                    kept = _floats(values)
                    kept = kept[np.isfinite(kept)]
                    place = (kept / 4 - low / 4) / span * bins if span else np.zeros(len(kept))
                    at = np.clip(place, 0, bins - 1).astype(np.int64)
                    counts[side] += np.bincount(at, minlength=bins)
        for i in range(bins):
            a, b = (low * (1 - j / bins) + high * (j / bins) for j in (i, i + 1))
            yield _bin(a, b, int(counts[0, i]), int(counts[1, i]), 0, pair=self._table.is_pair)

    def _octave_bins(self) -> Iterator[SharedBin]:
        known = sorted({exponent for counts in self._octaves for exponent in counts})
        for exponent in range(known[0], known[-1] + 1) if known else ():
            amounts = [counts.get(exponent, 0) for counts in self._octaves]
            low, high = math.ldexp(1.0, exponent), math.ldexp(1.0, exponent + 1) if exponent < 1023 else math.inf
            yield _bin(low, high, *amounts, pair=self._table.is_pair)


def _bin(low: float, high: float, baseline: int, target: int, difference: int, *, pair: bool) -> SharedBin:
    text = f"{low:.2e} … {high:.2e}: "
    text += f"baseline {baseline:,}, target {target:,}" if pair else f"{target:,}"
    text += f", Δ {difference:,}" if difference else ""
    return SharedBin(low, high, baseline, target, difference, text)


def _profile(values: Array, bad: Array, label: Callable[[int], str]) -> tuple[ProfileCell, ...]:
    num = len(values)
    starts = np.arange(min(PROFILE_CELLS, num)) * num // max(min(PROFILE_CELLS, num), 1)
    sizes = np.where(bad, np.inf, values)
    top = float(values.max(initial=0.0))
    found = []
    for a, b in zip(starts.tolist(), [*starts[1:].tolist(), *[num][: len(starts)]], strict=True):
        at = a + int(np.argmax(sizes[a:b]))
        text = "not finite" if bad[at] else number(float(values[at]))
        share = None if bad[at] else float(values[at]) / top if top else 0.0
        found.append(ProfileCell(share, f"{label(at)}: {text}", at))
    return tuple(found)


def _row_errors(table: ValueTable) -> tuple[Array, Array]:
    """[rows]: the relative error, or the rms of one run; and the largest |Δ| or |x|."""
    errors, peaks = np.zeros(table.num_rows), np.zeros(table.num_rows)
    for row, left, right in table.chunks():
        with np.errstate(all="ignore"):
            a, b = _floats(left), _floats(right)
            shown = np.abs(_floats(_difference(left, right)) if table.is_pair else b)
            norms = np.sqrt((shown * shown).sum(1))
            below = np.sqrt((a * a).sum(1)) if table.is_pair else math.sqrt(max(b.shape[1], 1))
            found = np.where(norms == 0, 0.0, norms / below)
        errors[row : row + len(b)], peaks[row : row + len(b)] = found, shown.max(1, initial=0.0)
    return errors, peaks


def _row_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """All axes before the last one that is longer than 1; of a vector none: it is one row."""
    return tuple(range(max((i for i, n in enumerate(shape) if n != 1), default=0)))


def _flat(index: Sequence[int], axes: Sequence[int], shape: Sequence[int]) -> int:
    found = 0
    for axis in axes:
        found = found * shape[axis] + index[axis]
    return found


def _row_column(index: Sequence[int], table: ValueTable) -> tuple[int, int]:
    if len(index) != 2:
        raise ConfigError(f"invalid index {list(index)}: expected row, column of {table.num_rows:,} × "
                          f"{table.num_columns:,}, or an index along every axis")  # fmt: skip
    row, column = index
    if not (0 <= row < table.num_rows and 0 <= column < table.num_columns):
        raise ConfigError(f"[{row},{column}] is outside of {table.num_rows:,} rows × {table.num_columns:,} columns")
    return row, column


def parse_index(text: str) -> tuple[int, ...]:
    """``[3, 17]`` or ``3,17``; raises ConfigError."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(" ", "").split(",")
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise ConfigError(f"invalid index {text!r}: expected numbers from 0, e.g. [3,17]")
    return tuple(map(int, words))


def _token_ids(info: Any) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    ids = iter(info.token_ids)
    for span in info.rows:
        request = found.setdefault(span.request, {})
        request.update(zip(range(span.position, span.position + span.count), ids, strict=False))
    return found


def _token_label(token: int | None, text: TokenText | None) -> str:
    return "" if token is None else f" #{token}" if text is None else f" {text(token)!r}"


def _is_exact(values: Array) -> bool:
    return values.dtype.kind in "iub" or "int" in values.dtype.name


def _floats(values: Array) -> Array:
    if values.dtype.kind == "c":
        values = np.abs(values)
    return np.asarray(values.astype(np.float64))


def _difference(left: Array, right: Array) -> Array:
    """target - baseline; integers exactly, 0 where both are equal or both are nan."""
    if _is_exact(left) and _is_exact(right):
        if np.uint64 in (left.dtype.type, right.dtype.type):
            exact = [[int(b) - int(a) for a, b in zip(*pair, strict=True)] for pair in zip(left, right, strict=True)]
            return np.array(exact, object).reshape(left.shape)
        return np.asarray(right.astype(np.int64) - left.astype(np.int64))
    if left.dtype.kind == "c" or right.dtype.kind == "c":
        return np.asarray(right.astype(np.complex128) - left.astype(np.complex128))
    a, b = left.astype(np.float64), right.astype(np.float64)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, b - a)


def _texts(values: Array) -> tuple[str, ...]:
    """Integers whole, floats to five significant digits."""
    if _is_exact(values):
        return tuple(str(bool(v)) if values.dtype == np.bool_ else str(int(v)) for v in values)
    if values.dtype.kind == "c":
        return tuple(f"{complex(v):.4g}" for v in values)
    return tuple(f"{float(v):.5g}" for v in values)


def _delta_texts(values: Array) -> tuple[str, ...]:
    if values.dtype.kind in "iuO":
        return tuple(f"{int(v):+d}" if v else "0" for v in values)
    return tuple(map(number, map(float, np.abs(values) if values.dtype.kind == "c" else values)))


def _padded(line: tuple[V, ...], width: int, filler: V) -> tuple[V, ...]:
    return line + (filler,) * (width - len(line))


def _fixed(value: float) -> Number:
    return Number(value, f"{value:.6f}")


def _ulps(value: float) -> Number:
    return Number(value, f"{value:,.0f}")
