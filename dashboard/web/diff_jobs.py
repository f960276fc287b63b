"""Comparisons in background threads of the server, cached by runs and options."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread

from tapscope.comparator import CompareOptions, Comparison, Finding, compare_open_runs
from tapscope.comparator.pair_analysis.token_view import PairReader
from tapscope.core.errors import ConfigError, DataError, TapscopeError
from tapscope.dashboard.model.diff import DiffView, HashedSteps, diff_view
from tapscope.dashboard.model.finding import FindingView, finding_view
from tapscope.dashboard.model.finding_grid import site_grid
from tapscope.dashboard.model.grid import Grid, PackedGrid, layer_grid
from tapscope.dashboard.model.grid_levels import GridLevel, grid_level
from tapscope.dashboard.model.module_graph import ModuleGraph, comparison_graph
from tapscope.dashboard.model.pair_values import finding_table
from tapscope.dashboard.model.place_grid import PlaceGrids, place_grids
from tapscope.dashboard.model.schema import escaped
from tapscope.dashboard.model.series import SiteSeries, finding_series
from tapscope.dashboard.model.tensor import PairView, pair_view
from tapscope.dashboard.model.token_labels import TokenLabels
from tapscope.dashboard.model.value_table import ValueTable
from tapscope.dashboard.web.roots import stamp_of
from tapscope.run_format.run import Run
from tapscope.sources import open_run

CACHED_JOBS = 4
CACHED_READERS = 8
MAX_COLUMNS = 1000
MAX_CELLS = 200_000
"""Maximum number of cells in the heat map of sites; steps are merged by maximum if there are more."""
MAX_KEPT = 10_000_000
"""Maximum number of cells that a job keeps for the levels of its heat map."""
MAX_TILE = 64
"""Maximum number of rows and columns of a tile."""

STILL_COMPARING = "still comparing"

Stamps = tuple[tuple[str, object], tuple[str, object]]
"""(path, change stamp) of both runs, see :func:`.stamp_of`."""


@dataclass(frozen=True, slots=True)
class JobState:
    """Progress of a comparison."""

    id: str
    state: str
    """``running``, ``done`` or ``failed``."""
    done: int
    total: int
    error: str
    """Error message of a failed comparison, else empty."""


@dataclass(frozen=True, slots=True)
class DiffPage:
    """Result of a finished comparison."""

    view: DiffView
    layers: PackedGrid
    sites: PackedGrid
    orders: tuple[int, ...]
    """Position of the finding in each row of ``sites``."""


@dataclass(frozen=True, slots=True)
class PlacePage:
    """Heat maps of layers by rank and by token; a heat map with a single column is left out."""

    layers: tuple[PackedGrid, ...]


@dataclass(frozen=True, slots=True)
class FindingPage:
    """Page of consecutive findings."""

    findings: tuple[FindingView, ...]
    offset: int
    num_findings: int
    """Number of findings in the whole comparison."""


class DiffJob:
    """One comparison, run in its own thread."""

    def __init__(self, job_id: str, stamps: Stamps, options: CompareOptions, known: "DiffJob | None" = None) -> None:
        """Start the comparison. The measurements of ``known`` are reused and only judged again."""
        self.id, self.stamps, self.options, self._known = job_id, stamps, options, known
        self._progress = (0, 0)
        self._error = ""
        self._result: tuple[tuple[Run, Run], Comparison] | None = None
        self._page: DiffPage | None = None
        self._sites: Grid | None = None
        self._tables: OrderedDict[int, ValueTable] = OrderedDict()
        self._tokens: TokenLabels | None = None
        self._readers: OrderedDict[int, PairReader | None] = OrderedDict()
        self._lock = Lock()
        self._places: PlaceGrids | None = None
        self._places_lock = Lock()
        self._thread = Thread(target=self._run, daemon=True, name=f"diff-{job_id}")
        self._thread.start()

    @property
    def state(self) -> JobState:
        """Progress of the comparison; never blocks."""
        word = "failed" if self._error else "done" if self._page is not None else "running"
        return JobState(self.id, word, *self._progress, self._error)

    @property
    def page(self) -> DiffPage | None:
        """Result of the comparison; None while it is running, or if it failed."""
        return self._page

    def measures(self, stamps: Stamps, options: CompareOptions) -> bool:
        """Return whether the measurements of this job can be judged by other ``options``."""
        return self.stamps == stamps and self.options.measures_as(options)

    def findings(self, offset: int, limit: int) -> FindingPage:
        """Return a page of all findings in execution order, including those left out of the view. Raises
        ConfigError."""
        report = self._compared[1].report
        names = report.baseline.name, report.target.name
        page = report.findings[offset : offset + limit]
        return FindingPage(tuple(finding_view(each, names) for each in page), offset, len(report.findings))

    def pair(
        self, order: int, num_rows: int, num_columns: int, steps: tuple[int, int] | None = None
    ) -> PairView | None:
        """Read the values around the largest error of a finding, within the inclusive range ``steps`` if given.

        None if no values were read for the comparison. Raises DataError.
        """
        with self._lock:
            reader = self._reader(order)
            return (
                None if reader is None else pair_view(order, reader, _bounded(num_rows), _bounded(num_columns), steps)
            )

    def places(self) -> PlacePage:
        """Return the heat maps of layers × ranks and layers × tokens, measured on the first call.

        Raises ConfigError while the comparison is running, and DataError.
        """
        return PlacePage(tuple(layer_grid(each).binned(MAX_COLUMNS).packed() for each in self._measured_places().shown))

    def sites(self, steps: tuple[int, int] | None) -> PackedGrid:
        """Return the heat map of the page's sites, within the inclusive range ``steps`` if given. Raises
        ConfigError."""
        if self._page is None:
            raise ConfigError(STILL_COMPARING)
        return _shown_sites(self._steps_grid(steps), self._page.orders)

    def level(self, axis: str, at: Sequence[int], within: tuple[int, int] | None = None) -> GridLevel:
        """Return one level of the heat map by step, rank or token, see :func:`grid_level`.

        Raises ConfigError for an invalid argument, and the errors of :meth:`places`.
        """
        if axis not in ("step", "rank", "token"):
            raise ConfigError(f"invalid axis {axis!r}: expected step, rank or token")
        if axis == "step":
            return grid_level(self._steps_grid(within), at, MAX_COLUMNS)
        places = self._measured_places()
        return grid_level(places.ranks if axis == "rank" else places.tokens, at, MAX_COLUMNS, within)

    def _steps_grid(self, within: tuple[int, int] | None) -> Grid:
        runs, comparison = self._compared
        if self._sites is None:
            raise ConfigError(STILL_COMPARING)
        if within is None:
            return self._sites
        part = self._sites.within(*within)
        if all(each.first == each.last for each in part.columns):
            return part
        return site_grid(comparison.report.findings, HashedSteps.of(runs)).within(*within)

    def _measured_places(self) -> PlaceGrids:
        _, comparison = self._compared
        with self._places_lock:
            if self._places is None:
                self._places = place_grids(comparison)
            return self._places

    def modules(self) -> ModuleGraph:
        """Return the module graph with errors. Raises ConfigError while the comparison is running."""
        runs, comparison = self._compared
        report = comparison.report
        title = f"{report.baseline.name} → {report.target.name}"
        return comparison_graph(title, report.findings, runs, comparison.origins())

    def series(self, order: int) -> SiteSeries:
        """Return the series of a finding over all steps. Raises ConfigError."""
        return finding_series(self._finding(order))

    def table(self, order: int) -> ValueTable:
        """Return all values of a finding on both sides. Raises DataError if no values were read for the comparison."""
        with self._lock:
            if order not in self._tables:
                runs, comparison = self._compared
                finding, reader = self._finding(order), self._reader(order)
                if self._tokens is None:
                    self._tokens = TokenLabels.of(runs[::-1], runs[1].step_lines())
                report = comparison.report
                names = report.baseline.name, report.target.name
                table = finding_table(finding, reader, names, self._tokens)
                if table is None:
                    raise DataError("no values to read: they are equal, or were not kept")
                self._tables[order] = table
                while len(self._tables) > CACHED_READERS:
                    self._tables.popitem(last=False)
            return self._tables[order]

    @property
    def _compared(self) -> tuple[tuple[Run, Run], Comparison]:
        """The runs and their comparison. Raises ConfigError until the comparison is finished."""
        if self._result is None:
            raise ConfigError(STILL_COMPARING)
        return self._result

    def _finding(self, order: int) -> Finding:
        """Return the finding at position ``order``. Raises ConfigError if there is none."""
        findings = self._compared[1].report.findings
        if not 0 <= order < len(findings):
            raise ConfigError(f"no finding {order} in this comparison")
        return findings[order]

    def _reader(self, order: int) -> PairReader | None:
        if order not in self._readers:
            self._readers[order] = self._compared[1].reader(self._finding(order))
            while len(self._readers) > CACHED_READERS:
                self._readers.popitem(last=False)
        return self._readers[order]

    def _run(self) -> None:
        try:
            runs, comparison = self._result = self._compare()
            grid = site_grid(comparison.report.findings, HashedSteps.of(runs))
            self._sites = grid.binned(max(MAX_KEPT // max(len(grid.rows), 1), 1))
            self._page = diff_page(comparison, runs, grid)
        except TapscopeError as error:
            self._error = str(error)
        except Exception as error:  # noqa: BLE001 - reported to the page; the server keeps running
            self._error = f"the comparison failed: {type(error).__name__}"

    def _compare(self) -> tuple[tuple[Run, Run], Comparison]:
        known, self._known = self._known, None
        if known is not None and known._result is not None:
            runs, comparison = known._result
            return runs, comparison.rejudged(self.options)
        (baseline, _), (target, _) = self.stamps
        runs = open_run(baseline), open_run(target)
        return runs, compare_open_runs(*runs, self.options, self._advance)

    def _advance(self, done: int, total: int, *_: int) -> None:
        self._progress = done, total


class DiffJobs:
    """Cache of the latest comparisons."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, DiffJob] = OrderedDict()
        self._lock = Lock()

    def start(self, baseline: Path, target: Path, options: CompareOptions) -> DiffJob:
        """Return the job that compares these runs; start it unless it is cached and the runs have not changed.

        Raises ConfigError if too many comparisons are running.
        """
        stamps = (str(baseline), stamp_of(baseline)), (str(target), stamp_of(target))
        job_id = sha256(repr((stamps, options)).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or job.state.state == "failed":
                if sum(each.state.state == "running" for each in self._jobs.values()) >= CACHED_JOBS:
                    raise ConfigError(f"{CACHED_JOBS} comparisons are running; try again when one of them has finished")
                done = (each for each in self._jobs.values() if each.state.state == "done")
                known = next((each for each in done if each.measures(stamps, options)), None)
                job = self._jobs[job_id] = DiffJob(job_id, stamps, options, known)
            self._jobs.move_to_end(job_id)
            while len(self._jobs) > CACHED_JOBS:
                del self._jobs[next(name for name, each in self._jobs.items() if each.state.state != "running")]
            return job

    def get(self, job_id: str) -> DiffJob:
        """Return a cached job. Raises ConfigError if it has expired."""
        job = self._jobs.get(job_id)
        if job is None:
            raise ConfigError("this comparison has expired: start it again")
        return job


def diff_page(comparison: Comparison, runs: tuple[Run, Run], grid: Grid) -> DiffPage:
    """Build the page of a comparison of open runs; ``grid`` is the heat map of all sites by step."""
    report = comparison.report
    view = diff_view(report, runs, grid=grid, max_steps=MAX_COLUMNS)
    orders = tuple(finding.order for finding in view.findings)
    layers: Grid = layer_grid(grid).binned(MAX_COLUMNS)
    return escaped(DiffPage(view, layers.packed(), _shown_sites(grid, orders), orders))


def _shown_sites(grid: Grid, orders: Sequence[int]) -> PackedGrid:
    return grid.selected(orders).binned(max(min(MAX_COLUMNS, MAX_CELLS // max(len(orders), 1)), 1)).packed()


def _bounded(size: int) -> int:
    return max(min(size, MAX_TILE), 1)
