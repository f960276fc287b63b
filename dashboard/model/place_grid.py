"""Heat maps of a comparison: sites × ranks of the target, and sites × tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.comparator import Comparison, Finding
from tapscope.comparator.pair_analysis.place_errors import Places
from tapscope.dashboard.model.finding_grid import judged_cells, site_rows
from tapscope.dashboard.model.grid import CODES, Grid, GridColumn, joined_columns
from tapscope.dashboard.model.spans import even_spans

Array = np.ndarray[Any, Any]

MAX_CELLS = 2_000_000
"""Maximum number of sites × tokens cells; adjacent tokens are merged by maximum if there are more."""
MAX_TOKENS = 1000


@dataclass(frozen=True, eq=False, slots=True)
class PlaceGrids:
    """Heat maps by rank and by token, with one row per finding."""

    ranks: Grid
    tokens: Grid
    """Columns are tokens, by request and position; empty without token rows."""

    @property
    def shown(self) -> tuple[Grid, ...]:
        """Grids with more than one column."""
        return tuple(grid for grid in (self.ranks, self.tokens) if len(grid.columns) > 1)


def place_grids(comparison: Comparison, progress: Callable[[int, int], None] = lambda done, total: None) -> PlaceGrids:
    """Measure the heat maps by reading the values of every bad finding again; other findings only show their verdict.

    ``progress`` receives (findings done, findings in total). Raises DataError if values can no longer be read.
    """
    errors, findings = comparison.place_errors(), comparison.report.findings
    held = sorted({rank for f in findings if f.target is not None for rank in f.target.ranks})
    most = max(min(MAX_TOKENS, MAX_CELLS // max(len(findings), 1)), 1)
    tokens = [GridColumn(i, i, f"{request}:{position}") for i, (request, position) in enumerate(errors.tokens)]
    spans = even_spans(len(tokens), most)
    bin_of = np.repeat(np.arange(len(spans)), [b - a for a, b in spans]) if spans else np.zeros(0, np.int64)
    by_rank, by_token = _Cells(len(findings), len(held)), _Cells(len(findings), len(spans))
    place = {rank: i for i, rank in enumerate(held)}
    for row, finding in enumerate(findings):
        places = comparison.places(errors, finding)
        if places is not None:
            by_rank.put(row, finding, np.array([place[rank] for rank in places.ranks.at.tolist()], int), places.ranks)
            by_token.put(row, finding, bin_of[places.tokens.at], places.tokens)
        elif finding.verdict.is_bad and finding.target is not None:
            by_rank.codes[row, [place[rank] for rank in finding.target.ranks]] = CODES[finding.verdict]
        progress(row + 1, len(findings))
    rows = site_rows(findings)
    return PlaceGrids(
        Grid(rows, tuple(GridColumn(rank, rank) for rank in held), by_rank.ratios, by_rank.codes, "rank"),
        Grid(rows, tuple(joined_columns(tokens[a:b]) for a, b in spans), by_token.ratios, by_token.codes, "token"),
    )


class _Cells:
    """Cells of a grid that is filled row by row."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.ratios = np.full((num_rows, num_columns), np.nan)
        self.codes = np.zeros((num_rows, num_columns), np.uint8)

    def put(self, row: int, finding: Finding, columns: Array, places: Places) -> None:
        """Fill row ``row`` with the errors of a finding's ``places``, whose grid columns are ``columns``."""
        errors, one = places.errors, np.zeros(len(places.errors), np.int64)
        largest = np.array([np.fmax.reduce(errors, initial=0.0)])
        ratios, codes = judged_cells((finding,), one, errors, places.max_abs, largest)
        np.fmax.at(self.ratios[row], columns, ratios)
        np.maximum.at(self.codes[row], columns, codes)
