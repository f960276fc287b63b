"""Routes of all values of a record or a finding: overview, tiles, cells, searches and tokens."""

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Query
from fastapi.responses import Response

from tapscope.core.errors import ConfigError
from tapscope.dashboard.model.overview import overview
from tapscope.dashboard.model.tile import cell, tile
from tapscope.dashboard.model.token_strip import token_strip
from tapscope.dashboard.model.value_map import value_map
from tapscope.dashboard.model.value_search import find, largest
from tapscope.dashboard.model.value_table import ValueTable, parse_index
from tapscope.dashboard.web.api import Limit, Offset, Text, json_response
from tapscope.dashboard.web.diff_jobs import MAX_TILE, DiffJobs
from tapscope.dashboard.web.roots import Roots

MAP_ROWS, MAP_COLUMNS = 48, 96
"""Size of a table's heat map, in cells."""
_Size = Annotated[int, Query(ge=1)]
_Order = Annotated[Literal["position", "error"], Query(alias="order")]
"""Named ``order`` in the query only: in the path of a finding, ``order`` is the position of the finding."""
_Number = Annotated[float | None, Query(ge=0.0)]


def add_table_routes(app: FastAPI, roots: Roots, jobs: DiffJobs) -> None:
    """Add the tables of a record (``/api/runs/ID/table``) and of a finding (``/api/diffs/ID/pairs/ORDER/table``)."""

    def of_record(run_id: str, site: Text, step: int, rank: int = 0, key: str = "") -> ValueTable:
        return roots.table(run_id, site, step, rank, key)

    def of_finding(job_id: str, order: int) -> ValueTable:
        return jobs.get(job_id).table(order)

    for prefix, table_of in (
        ("/api/runs/{run_id}/table", of_record),
        ("/api/diffs/{job_id}/pairs/{order}/table", of_finding),
    ):
        _add_table(app, prefix, table_of)


def _add_table(app: FastAPI, prefix: str, table_of: Callable[..., ValueTable]) -> None:
    table = Annotated[ValueTable, Depends(table_of)]

    @app.get(prefix)
    def get_overview(values: table) -> Response:
        return json_response(overview(values))

    @app.get(f"{prefix}/tile")
    def get_tile(values: table, row: int = 0, column: int = 0, rows: _Size = 24, columns: _Size = 12) -> Response:
        _check_place(values, row, column)
        return json_response(tile(values, row, column, min(rows, MAX_TILE), min(columns, MAX_TILE)))

    @app.get(f"{prefix}/cell")
    def get_cell(values: table, row: int = 0, column: int = 0) -> Response:
        _check_place(values, row, column)
        return json_response(cell(values, row, column))

    @app.get(f"{prefix}/place")
    def get_place(values: table, index: Text) -> Response:
        return json_response(values.place(parse_index(index)))

    @app.get(f"{prefix}/find")
    def get_find(
        values: table,
        row: int = 0,
        column: int = 0,
        direction: int = 1,
        more_than: _Number = None,
    ) -> Response:
        _check_place(values, row, column)
        if direction not in (1, -1):
            raise ConfigError(f"invalid direction {direction}: expected 1 or -1")
        return json_response(find(values, row, column, direction, more_than))

    @app.get(f"{prefix}/map")
    def get_map(values: table) -> Response:
        return json_response(value_map(values).binned(MAP_ROWS, MAP_COLUMNS).packed(values))

    @app.get(f"{prefix}/largest")
    def get_largest(
        values: table, row: int = 0, column: int = 0, last_row: int | None = None, last_column: int | None = None
    ) -> Response:
        _check_place(values, row, column)
        end = values.num_rows if last_row is None else min(last_row + 1, values.num_rows)
        stop = values.num_columns if last_column is None else min(last_column + 1, values.num_columns)
        return json_response(largest(values, (row, max(end, row)), (column, max(stop, column))))

    @app.get(f"{prefix}/tokens")
    def get_tokens(values: table, by: _Order = "position", offset: Offset = 0, limit: Limit = 200) -> Response:
        return json_response(token_strip(values, by, offset, limit))


def _check_place(values: ValueTable, row: int, column: int) -> None:
    """Raise ConfigError for an element outside the table; (0, 0) is allowed if the table is empty."""
    if not (0 <= row < max(values.num_rows, 1) and 0 <= column < max(values.num_columns, 1)):
        size = f"{values.num_rows:,} rows × {values.num_columns:,} columns"
        raise ConfigError(f"row {row}, column {column} is outside of {size}")
