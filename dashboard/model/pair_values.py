"""Value table of a finding, with both sides."""

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
    """Values of a finding on both sides that were read for the comparison; rows with equal hashes are not included."""

    is_pair = True

    def __init__(self, reader: PairReader, link: Permalink, tokens: TokenLabels) -> None:
        """``link`` is the permalink of the finding; ``tokens`` are the token labels of the target."""
        self._reader, self._link, self._tokens = reader, link, tokens
        self.num_rows, self.num_columns, self.dtypes = reader.num_rows, reader.width, reader.dtypes

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Return rows of one step, on both sides."""
        return self._reader.chunk(row, num_rows, columns)

    def label(self, row: int) -> str:
        """Return ``0:5 #1820 ' the'``: request, position, token id and text.

        Without token rows, return the index of the row within its step.
        """
        place, label = self._reader.token_place(row), self._reader.labels[row]
        return label if place is None else label + self._tokens.of_place(*place)

    def position(self, row: int) -> tuple[str, int, int]:
        """Return (request, position, branch); without token rows the index of the row within its step."""
        return self._reader.token_place(row) or ("", int(self._reader.labels[row]), 0)

    def step(self, row: int) -> int:
        """Return the target step of the row."""
        return int(self._reader.steps[row])

    def index(self, row: int, column: int) -> tuple[int, ...]:
        """Return the index in the target's tensor, assembled from all ranks."""
        return self._reader.target_index(row, column)

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """Validate (row, column) of the table. Raises ConfigError."""
        return self._row_column(index)

    def link(self, row: int, column: int) -> str:
        """Return the permalink of the target's element, in the record of the lowest rank that has the element."""
        rank, index = self._reader.recorded_index(row, column)
        rank = self._link.rank if rank < 0 else rank
        return str(Permalink(self._link.run, self._link.site, self.step(row), rank, index or None))

    def place_of(self, at: Permalink) -> tuple[int, int]:
        """Find the element by search: rows of the step whose row axes match, then their columns. Raises ConfigError."""
        rows = np.flatnonzero(np.asarray(self._reader.steps) == at.step).tolist()
        if not at.index and rows:
            return rows[0], 0
        first = np.array([self._reader.recorded_index(row, 0)[1] for row in rows], np.int64)
        if at.index and first.ndim == 2 and first.shape[1] == len(at.index):
            axes = (first != first[0]).any(0)  # row axes; if there is only one row, all of its columns are searched
            copy: tuple[int, int] | None = None
            for i in np.flatnonzero((first == at.index)[:, axes].all(1)).tolist():
                for column in range(self.num_columns):
                    rank, index = self._reader.recorded_index(rows[i], column)
                    if (rank, index) == (at.rank, at.index):
                        return rows[i], column
                    copy = copy or ((rows[i], column) if index == at.index else None)
            if copy is not None:  # the element of a lower rank that has the same values
                return copy
        raise ConfigError(f"{at} is not among the values that differ")


def finding_table(
    finding: Finding, reader: PairReader | None, names: tuple[str, str], tokens: TokenLabels
) -> ValueTable | None:
    """Return all values of a finding; None if no values were read. ``names`` are the names of baseline and target."""
    if reader is None or not reader.num_rows:
        return None
    return folded(PairValueTable(reader, replace(link_of(finding, names), index=None), tokens))
