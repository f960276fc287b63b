"""Messages that workers post to a screen with their results; the screen drops outdated ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text
from textual.message import Message
from textual.worker import Worker, get_current_worker

from tapscope.core.errors import TapscopeError
from tapscope.dashboard.browse_source import ModuleCounts, Query, RunSource
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.series import SiteSeries
from tapscope.render.tensor_summary import Digest
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records

if TYPE_CHECKING:  # the comparator is slow to import, and browsing a single run does not need it
    from tapscope.comparator import Finding, TokenView
    from tapscope.comparator.metrics.detail import Detail
    from tapscope.dashboard.diff_source import DiffSource
    from tapscope.dashboard.model.module_graph import ModuleGraph
    from tapscope.dashboard.model.place_grid import PlaceGrids
    from tapscope.dashboard.model.value_table import ValueTable


@dataclass
class Answer(Message):
    """Result of a worker. It may be outdated on arrival, see :meth:`.WorkerScreen.accept`."""

    worker: Worker[None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Store the current worker; runs in the worker's thread."""
        super().__post_init__()
        self.worker = get_current_worker()


@dataclass
class SourceOpened(Answer):
    """The run is open and its index has been read."""

    source: RunSource
    seconds: float
    """Time that opening took."""


@dataclass
class RunExtended(Message):
    """Result of checking whether a followed run has grown since it was read."""

    source: RunSource
    has_grown: bool


@dataclass
class TableOpened(Answer):
    """The value table of a record or finding is open; None if it has no values."""

    table: "ValueTable | None"
    title: str
    problem: str = ""
    place: tuple[int, int] = (0, 0)
    """Row and column of the initial cursor position."""


@dataclass
class ModulesReady(Answer):
    """The module graph of a run or a comparison."""

    graph: "ModuleGraph"
    link_of: Callable[[str], Permalink]
    """Site -> permalink."""


@dataclass
class SeriesReady(Answer):
    """The series of a site over all steps, and the run's metrics."""

    site: str
    series: tuple[SiteSeries, ...]


@dataclass
class OpenFailed(Answer):
    """The run cannot be opened."""

    error: TapscopeError


@dataclass
class RecordsReady(Answer):
    """Records that match a query of the browse screen."""

    query: Query
    records: Records


@dataclass
class CountsReady(Answer):
    """Record counts of the module tree for one step and rank."""

    counts: ModuleCounts


@dataclass
class DigestReady(Answer):
    """The digest of a tensor has been computed."""

    record: Record
    digest: Digest


@dataclass
class DigestFailed(Answer):
    """The tensor of a record cannot be read."""

    record: Record
    error: TapscopeError


@dataclass
class Compared(Answer):
    """The comparison of two runs is complete."""

    source: "DiffSource"


@dataclass
class Comparing(Answer):
    """Progress of a comparison: sites measured, and sites in total."""

    done: int
    total: int


@dataclass
class Measuring(Answer):
    """Progress of the heat maps by rank and token: findings measured, and findings in total."""

    done: int
    total: int


@dataclass
class PlacesReady(Answer):
    """The heat maps by rank and token, or the reason why they are unavailable."""

    source: "DiffSource"
    grids: "PlaceGrids | None"
    problem: str = ""


@dataclass
class FindingsReady(Answer):
    """Findings that match a query of the diff screen."""

    findings: "list[Finding]"


@dataclass
class TokenViewReady(Answer):
    """The token view of a finding; None if it has no values."""

    finding: "Finding"
    token_view: "TokenView | None"


@dataclass
class DetailReady(Answer):
    """Detailed measures of a finding, or the reason why they are unavailable."""

    finding: "Finding"
    detail: "Detail | None"
    problem: str = ""


@dataclass
class StatusMessage(Answer):
    """A status message from a worker."""

    sentence: str


@dataclass
class AccountReady(Answer):
    """The summary of the run or comparison on the screen, as text."""

    text: Text


@dataclass
class TokenViewFailed(Answer):
    """The values of a finding cannot be read."""

    finding: "Finding"
    error: TapscopeError
