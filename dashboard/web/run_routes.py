"""Routes of recorded runs."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import Response

from tapscope.dashboard.browse_source import Query as RecordQuery
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.model.grid import PackedGrid
from tapscope.dashboard.model.grid_levels import GridLevel
from tapscope.dashboard.model.magnitudes import MEASURES
from tapscope.dashboard.model.permalink import parse_permalink
from tapscope.dashboard.model.record import record_view
from tapscope.dashboard.model.run import (
    RunSummary,
    RunView,
    cell_records,
    magnitude_grid,
    magnitude_level,
    record_page,
    run_view,
)
from tapscope.dashboard.model.series import metric_series, site_series
from tapscope.dashboard.web.api import Limit, Offset, Rows, Text, json_of, json_response, row_numbers, spanned
from tapscope.dashboard.web.roots import Roots

MAX_RUNS = 200
"""Maximum number of runs per response; the page requests more as needed."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Page of the list of runs, newest first."""

    runs: tuple[RunSummary, ...]
    num_runs: int
    """Length of the whole list."""


def add_run_routes(app: FastAPI, roots: Roots) -> None:
    """Add the routes for the list of runs and for the contents of each run."""

    @app.get("/api/runs")
    def get_runs(offset: Offset = 0) -> Response:
        return json_response(Runs(roots.summaries(offset, MAX_RUNS), roots.num_runs))

    @app.get("/api/link")
    def get_link(link: Annotated[str, Query(max_length=2000)]) -> Response:
        return json_response(roots.places_of(parse_permalink(link)))

    @app.get("/api/runs/{run_id}")
    def get_run(run_id: str, rank: int | None = None, measure: Text = MEASURES[0]) -> Response:
        def view(source: RunSource) -> RunView:
            return run_view(source, run_id, rank=rank, measure=measure)

        return json_of(roots.json(run_id, ("run", rank, measure), view))

    @app.get("/api/runs/{run_id}/level")
    def get_level(
        run_id: str,
        rank: int | None = None,
        measure: Text = MEASURES[0],
        at: Rows = "",
        first: int | None = None,
        last: int | None = None,
    ) -> Response:
        within = spanned(first, last)

        def view(source: RunSource) -> GridLevel:
            return magnitude_level(source, row_numbers(at), rank, measure, within)

        return json_of(roots.json(run_id, ("level", rank, measure, at, within), view))

    @app.get("/api/runs/{run_id}/magnitudes")
    def get_magnitudes(
        run_id: str, first: int, last: int, rank: int | None = None, measure: Text = MEASURES[0]
    ) -> Response:
        def view(source: RunSource) -> PackedGrid:
            return magnitude_grid(source, rank, measure=measure, within=(first, last))

        return json_of(roots.json(run_id, ("magnitudes", rank, measure, first, last), view))

    @app.get("/api/runs/{run_id}/records")
    def get_records(
        run_id: str, step: int, rank: int = 0, find: Text = "", offset: Offset = 0, limit: Limit = 2000
    ) -> Response:
        query = RecordQuery(step, rank, find=find)
        key = "records", query, offset, limit
        return json_of(roots.json(run_id, key, lambda source: record_page(source.records(query), offset, limit)))

    @app.get("/api/runs/{run_id}/modules")
    def get_modules(run_id: str, step: int, rank: int = 0) -> Response:
        return json_of(roots.json(run_id, ("modules", step, rank), lambda source: source.module_graph(step, rank)))

    @app.get("/api/runs/{run_id}/cell")
    def get_cell(run_id: str, site: Text, first: int, last: int, rank: int | None = None) -> Response:
        return json_response(cell_records(roots.source(run_id), site, first, last, rank))

    @app.get("/api/runs/{run_id}/tensor")
    def get_tensor(run_id: str, site: str, step: int, rank: int = 0, key: str = "") -> Response:
        source, record = roots.record(run_id, site, step, rank, key)
        return json_response(record_view(source.run, record, source.num_firings(record)))

    @app.get("/api/runs/{run_id}/series")
    def get_series(run_id: str, site: Text = "") -> Response:
        series = (lambda source: site_series(source, site)) if site else metric_series
        return json_of(roots.json(run_id, ("series", site), series))
