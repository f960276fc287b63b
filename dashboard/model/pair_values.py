"""PairValueTable: all values that were read of a finding, on both sides, as rows × columns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tapscope.comparator import Finding
from tapscope.comparator.pair_analysis.token_view import PairReader
from tapscope.core.errors import ConfigError
from tapscope.dashboard.model.finding import link_of
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.token_labels import TokenLabels
from tapscope.dashboard.model.value_table import ValueTable, folded

Array = np.ndarray[Any, Any]


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


def finding_table(
    finding: Finding, reader: PairReader | None, names: tuple[str, str], tokens: TokenLabels
) -> ValueTable | None:
    """All values of a finding; None where nothing had to be read. ``names`` are those of baseline and target."""
    if reader is None or not reader.num_rows:
        return None
    return folded(PairValueTable(reader, replace(link_of(finding, names), index=None), tokens))
