"""Heat map of a comparison: sites or layers × steps, ranks or tokens.

A cell has the worst verdict and the largest error ÷ floor of its members. Cells are merged only by maximum, so a bad
cell never disappears in an average.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self, TypeVar

import numpy as np

from tapscope.comparator import Verdict
from tapscope.comparator.report.answer import share
from tapscope.core.errors import ConfigError
from tapscope.core.site import layer_of, module_of
from tapscope.dashboard.model.spans import even_spans

Array = np.ndarray[Any, Any]
AnyGrid = TypeVar("AnyGrid", bound="Grid")

EMPTY = "·"
"""Glyph of a cell without a comparison."""
BY_SEVERITY = (
    None,
    Verdict.ONLY_TARGET,
    Verdict.ONLY_BASELINE,
    Verdict.SAME,
    Verdict.CLOSE,
    Verdict.SHAPE,
    Verdict.DIFFERS,
    Verdict.NONFINITE,
)
"""Code of a cell -> its verdict; merged cells take the largest code."""
CODES = {verdict: code for code, verdict in enumerate(BY_SEVERITY)}
_FEW = 8
"""Average number of members per row from which a loop over rows is faster than ``reduceat``."""
_DECADES = 9
"""Largest number of decades above the floor that has its own digit."""


@dataclass(frozen=True, slots=True)
class GridRow:
    """Row of a heat map: a layer, a module outside all layers, or a site."""

    name: str
    """Layer number, module path (empty for the model itself), or site."""
    label: str
    """``layer 12`` or ``lm_head``; ``(root)`` for the model itself; a nested row's label is relative to its parent."""
    verdict: Verdict
    """Worst verdict of the row's findings, over all columns."""
    orders: tuple[int, ...]
    """Indices of the row's members: findings in execution order, or rows of the grid that was grouped."""
    is_cause: bool = False
    """Whether the row contains a producer, which adds its own error."""


@dataclass(frozen=True, slots=True)
class GridColumn:
    """Column of a heat map: consecutive compared steps, ranks or tokens of the target."""

    first: int
    """First step, rank, or index among all tokens."""
    last: int
    name: str = ""
    """Name of a token, ``0:5`` for position 5 of request 0; empty for steps and ranks."""
    last_name: str = ""
    """Name of the last token, if the column spans several."""

    @property
    def label(self) -> str:
        """Text of the column: ``7``, ``7-12``, ``0:5`` or ``0:5…0:8``."""
        if self.name:
            return f"{self.name}…{self.last_name}" if self.last_name else self.name
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a heat map."""

    verdict: Verdict | None
    """Worst verdict; None if nothing was compared."""
    ratio: float
    """error ÷ floor; 0 for equal values, inf if no floor applies, nan if nothing was compared."""

    @property
    def value(self) -> float | None:
        """log10(error ÷ floor); None unless finite."""
        return math.log10(self.ratio) if 0.0 < self.ratio < math.inf else None

    @property
    def glyph(self) -> str:
        """One character that represents the cell without color.

        ``1`` to ``9``: decades above the floor, so ``2`` is up to 100 times; ``!``: differs by another measure; ``%``:
        non-finite; ``#``: not comparable; ``~``: within the floor; ``=``: equal; ``·``: not compared.
        """
        if self.verdict is None:
            return EMPTY
        if self.verdict is Verdict.DIFFERS and 1.0 < self.ratio < math.inf:
            return str(min(math.ceil(math.log10(self.ratio)), _DECADES))
        return self.verdict.glyph

    @property
    def text(self) -> str:
        """Text of error ÷ floor for all front ends; ``-`` if not a number."""
        is_measured = math.isfinite(self.ratio) and (self.ratio > 0.0 or self.verdict is not Verdict.CLOSE)
        return share(self.ratio) if is_measured and self.verdict is not None else "-"


@dataclass(frozen=True, slots=True)
class GridRowData:
    """A heat-map row as JSON."""

    name: str
    label: str
    verdict: str
    is_cause: bool
    glyphs: str
    """One character per column, see :attr:`Cell.glyph`."""
    values: tuple[float | None, ...]
    """log10(error ÷ floor) per column."""


@dataclass(frozen=True, slots=True)
class GridData:
    """A heat map as JSON."""

    columns: tuple[GridColumn, ...]
    rows: tuple[GridRowData, ...]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A heat-map row in the compact JSON of a report."""

    label: str
    verdict: str
    is_cause: bool
    glyphs: str
    cells: str
    """error ÷ floor per column, separated by spaces; ``TEXT*N`` repeats TEXT for N columns, see :func:`_run_lengths`.
    """


@dataclass(frozen=True, slots=True)
class PackedGrid:
    """A heat map in the compact JSON of a report or web page."""

    columns: tuple[tuple[int, int], ...]
    """First and last step of each column."""
    rows: tuple[PackedRow, ...]
    axis: str = "step"
    """Meaning of a column: ``step``, ``rank`` or ``token``."""
    names: tuple[str, ...] = ()
    """Labels of the columns; empty if their numbers suffice."""
    spans: tuple[tuple[int, int], ...] = ()
    """First and last table row that each line merges; empty for sites and layers."""


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """A heat map: rows × columns with an error and a verdict per cell."""

    rows: tuple[GridRow, ...]
    columns: tuple[GridColumn, ...]
    ratios: Array
    """[rows, columns] float64, the largest error ÷ floor; nan if nothing was compared."""
    codes: Array
    """[rows, columns] uint8, the worst verdict as an index of :data:`BY_SEVERITY`."""
    axis: str = "step"
    """Meaning of a column: ``step``, ``rank`` or ``token``."""

    def cell(self, row: int, column: int) -> Cell:
        """Return the cell at ``row`` and ``column``."""
        return Cell(BY_SEVERITY[self.codes[row, column]], float(self.ratios[row, column]))

    def column_of(self, step: int) -> int | None:
        """Return the index of the column that contains ``step``; None if no column does."""
        return next((i for i, each in enumerate(self.columns) if each.first <= step <= each.last), None)

    def span(self, first: int, stop: int) -> Self:
        """Return the columns with indices from ``first`` up to, not including, ``stop``."""
        here = slice(first, stop)
        return replace(self, columns=self.columns[here], ratios=self.ratios[:, here], codes=self.codes[:, here])

    def within(self, first: int, last: int) -> Self:
        """Return the columns that overlap the steps, ranks or tokens from ``first`` to ``last``, inclusive.

        Raises ConfigError if there are none.
        """
        here = [i for i, each in enumerate(self.columns) if each.first <= last and each.last >= first]
        if not here:
            raise ConfigError(f"no {self.axis} from {first} to {last} in the heat map")
        return self.span(here[0], here[-1] + 1)

    def binned(self, num_columns: int) -> Self:
        """Merge adjacent columns by maximum so that at most ``num_columns`` remain."""
        num = len(self.columns)
        if num <= num_columns or num_columns < 1:
            return self
        spans = even_spans(num, num_columns)
        columns = tuple(joined_columns(self.columns[a:b]) for a, b in spans)
        ratios, codes = self._joined(np.array([a for a, _ in spans]), axis=1)
        return replace(self, columns=columns, ratios=ratios, codes=codes)

    def grouped(self, rows: Sequence[GridRow]) -> Self:
        """Merge rows by maximum into the given ``rows``, whose ``orders`` are row indices of this grid."""
        order = np.array([i for row in rows for i in row.orders], np.int64)
        starts = np.cumsum([0, *(len(row.orders) for row in rows)][:-1]) if rows else np.zeros(0, np.int64)
        in_order = np.array_equal(order, np.arange(len(self.rows)))  # usual for layers: avoids a copy
        shuffled = self if in_order else replace(self, ratios=self.ratios[order], codes=self.codes[order])
        ratios, codes = shuffled._joined(starts, axis=0)
        return replace(self, rows=tuple(rows), ratios=ratios, codes=codes)

    def selected(self, indices: Sequence[int]) -> Self:
        """Return the rows with the given indices."""
        picked = list(indices)
        return replace(
            self, rows=tuple(self.rows[i] for i in picked), ratios=self.ratios[picked], codes=self.codes[picked]
        )

    def packed(self) -> "PackedGrid":
        """Return compact JSON: formatted values with run-length encoding."""
        return PackedGrid(
            tuple((each.first, each.last) for each in self.columns),
            tuple(
                PackedRow(
                    row.label, str(row.verdict), row.is_cause, "".join(c.glyph for c in cells), _run_lengths(cells)
                )
                for row, cells in self._cells()
            ),
            self.axis,
            tuple(each.label for each in self.columns) if self.axis == "token" else (),
        )

    def _cells(self) -> Iterator[tuple[GridRow, list[Cell]]]:
        for r, row in enumerate(self.rows):
            yield row, [self.cell(r, c) for c in range(len(self.columns))]

    def data(self) -> GridData:
        """Return the grid as JSON."""
        rows = tuple(
            GridRowData(
                row.name,
                row.label,
                str(row.verdict),
                row.is_cause,
                "".join(cell.glyph for cell in cells),
                tuple(None if cell.value is None else round(cell.value, 3) for cell in cells),
            )
            for row, cells in self._cells()
        )
        return GridData(self.columns, rows)

    def _joined(self, starts: Array, axis: int) -> tuple[Array, Array]:
        if not self.ratios.size or not len(starts):
            shape = (len(starts), self.ratios.shape[1]) if axis == 0 else (self.ratios.shape[0], len(starts))
            return np.full(shape, np.nan), np.zeros(shape, np.uint8)
        if axis == 0 and len(starts) * _FEW <= len(self.ratios):  # reduceat along rows is seven times slower
            stops = [*starts[1:].tolist(), len(self.ratios)]
            spans = [slice(a, b) for a, b in zip(starts.tolist(), stops, strict=True)]
            ratios = np.stack([np.fmax.reduce(self.ratios[span], axis=0) for span in spans])
            return ratios, np.stack([np.maximum.reduce(self.codes[span], axis=0) for span in spans])
        return np.fmax.reduceat(self.ratios, starts, axis=axis), np.maximum.reduceat(self.codes, starts, axis=axis)


def joined_columns(columns: Sequence[GridColumn]) -> GridColumn:
    """Merge adjacent columns into one."""
    first, last = columns[0], columns[-1]
    is_one = len(columns) == 1
    return first if is_one else GridColumn(first.first, last.last, first.name, last.last_name or last.name)


def layer_grid(sites: AnyGrid) -> AnyGrid:
    """Merge sites into one row per layer and one per module outside all layers, in order of first execution."""
    members: dict[tuple[str, bool], list[int]] = {}
    for i, row in enumerate(sites.rows):
        members.setdefault(group_of(row.name), []).append(i)
    labels = _labels(members)
    rows = [joined_row(sites.rows, who[0], labels[who], own) for who, own in members.items()]
    return sites.grouped(rows)


def joined_row(sites: Sequence[GridRow], name: str, label: str, orders: Sequence[int]) -> GridRow:
    """Return the row that merges the sites with the indices ``orders``."""
    own = [sites[i] for i in orders]
    return GridRow(
        name, label, worst([each.verdict for each in own]), tuple(orders), any(each.is_cause for each in own)
    )


def group_of(site: str) -> tuple[str, bool]:
    """Return the name of the site's row in :func:`layer_grid`, and whether that row is a layer."""
    path = module_of(site)
    layer = layer_of(path)
    return (path, False) if layer is None else (str(layer), True)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict."""
    return max(set(verdicts), key=lambda verdict: CODES[verdict])


def _labels(names: Iterable[tuple[str, bool]]) -> dict[tuple[str, bool], str]:
    """Label each row: ``layer N``, or the last component of a module path, the whole path if that is ambiguous."""
    last = {who: who[0].rpartition(".")[2] for who in names if not who[1]}
    often = Counter(last.values())
    labels = {who: name if often[name] == 1 else who[0] for who, name in last.items()}
    return {who: f"layer {who[0]}" if who[1] else labels[who] or "(root)" for who in names}


def _run_lengths(cells: Sequence[Cell]) -> str:
    """Encode the error ÷ floor of cells: repeated values as ``TEXT*N``, numbers shortened as by :func:`_short`.

    ``.45`` stands for 0.45, ``5.8e4`` for 5.8e+04, ``5.8E4`` for 5.8e-04.
    """
    return " ".join(
        text if (num := len(list(same))) == 1 else f"{text}*{num}"
        for text, same in groupby(_short(cell.text) for cell in cells)
    )


def _short(text: str) -> str:
    mantissa, mark, exponent = text.partition("e")
    if not mark:
        return text.removeprefix("0") if text.startswith("0.") else text
    return f"{mantissa}{'E' if exponent[0] == '-' else 'e'}{int(exponent[1:])}"
