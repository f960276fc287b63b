"""Routes of comparisons."""

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from tapscope.comparator import CompareOptions
from tapscope.dashboard.web.api import Limit, Offset, Rows, json_response, row_numbers, spanned
from tapscope.dashboard.web.diff_jobs import STILL_COMPARING, DiffJobs
from tapscope.dashboard.web.roots import Roots


def add_diff_routes(app: FastAPI, roots: Roots, jobs: DiffJobs) -> None:
    """Add the routes that start a comparison, report its progress, and return its parts."""

    @app.post("/api/diffs")
    def post_diff(baseline: str, target: str, rtol: float | None = None, atol: float | None = None) -> Response:
        options = CompareOptions(rtol=rtol, atol=atol)
        return json_response(jobs.start(roots.path(baseline), roots.path(target), options).state)

    @app.get("/api/diffs/{job_id}")
    def get_diff(job_id: str) -> Response:
        return json_response(jobs.get(job_id).state)

    @app.get("/api/diffs/{job_id}/view")
    def get_view(job_id: str) -> Response:
        page = jobs.get(job_id).page
        return JSONResponse({"error": STILL_COMPARING}, 409) if page is None else json_response(page)

    @app.get("/api/diffs/{job_id}/findings")
    def get_findings(job_id: str, offset: Offset = 0, limit: Limit = 2000) -> Response:
        return json_response(jobs.get(job_id).findings(offset, limit))

    @app.get("/api/diffs/{job_id}/places")
    def get_places(job_id: str) -> Response:
        return json_response(jobs.get(job_id).places())

    @app.get("/api/diffs/{job_id}/level")
    def get_level(
        job_id: str, axis: str = "step", at: Rows = "", first: int | None = None, last: int | None = None
    ) -> Response:
        return json_response(jobs.get(job_id).level(axis, row_numbers(at), spanned(first, last)))

    @app.get("/api/diffs/{job_id}/sites")
    def get_sites(job_id: str, first: int | None = None, last: int | None = None) -> Response:
        return json_response(jobs.get(job_id).sites(spanned(first, last)))

    @app.get("/api/diffs/{job_id}/modules")
    def get_modules(job_id: str) -> Response:
        return json_response(jobs.get(job_id).modules())

    @app.get("/api/diffs/{job_id}/pairs/{order}")
    def get_pair(
        job_id: str, order: int, rows: int = 7, columns: int = 12, first: int | None = None, last: int | None = None
    ) -> Response:
        return json_response(jobs.get(job_id).pair(order, rows, columns, spanned(first, last)))

    @app.get("/api/diffs/{job_id}/pairs/{order}/series")
    def get_pair_series(job_id: str, order: int) -> Response:
        return json_response(jobs.get(job_id).series(order))
