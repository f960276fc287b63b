"""Routes of the benchmark history."""

from threading import Lock

from fastapi import FastAPI
from fastapi.responses import Response

from tapscope.core.errors import DataError
from tapscope.dashboard.bench_source import BenchSource
from tapscope.dashboard.model.bench_history import BenchTable
from tapscope.dashboard.web.api import Text, json_response


def add_bench_routes(app: FastAPI, source: BenchSource | None) -> None:
    """Add ``/api/benchmarks``, which reads new and changed files, and ``/api/benchmarks/compare`` for two commits."""
    lock = Lock()
    known: list[BenchTable] = []

    def read() -> BenchTable:
        if source is None:
            raise DataError("no benchmark results: start tapscope web with --benchmarks DIR")
        with lock:
            known[:] = [BenchTable(source.read())]
            return known[0]

    @app.get("/api/benchmarks")
    def get_benchmarks() -> Response:
        return json_response(read().history())

    @app.get("/api/benchmarks/compare")
    def get_comparison(baseline: Text, target: Text) -> Response:
        table = known[0] if known else read()
        return json_response(table.compare(baseline, target))
