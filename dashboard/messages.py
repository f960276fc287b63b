"""Messages: how workers hand results to the screen, which drops late ones."""

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

if TYPE_CHECKING:  # the comparator is slow to import, and one run needs none of it
    from tapscope.comparator import Finding, TokenView
    from tapscope.comparator.metrics.detail import Detail
    from tapscope.dashboard.diff_source import DiffSource
    from tapscope.dashboard.model.module_graph import ModuleGraph
    from tapscope.dashboard.model.place_grid import PlaceGrids
    from tapscope.dashboard.model.value_table import ValueTable


@dataclass
class Answer(Message):
    """A worker's answer. It may be late, see :meth:`.WorkerScreen.accept`."""

    worker: Worker[None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Called in the worker."""
        super().__post_init__()
        self.worker = get_current_worker()


@dataclass
class SourceOpened(Answer):
    """The run's index has been read."""

    source: RunSource
    seconds: float
    """How long that took."""


@dataclass
class RunExtended(Message):
    """Whether a run that is followed has grown since it was read."""

    source: RunSource
    has_grown: bool


@dataclass
class TableOpened(Answer):
    """All values of a record or a finding can be read; None: there are none."""

    table: "ValueTable | None"
    title: str
    problem: str = ""
    place: tuple[int, int] = (0, 0)
    """Row and column to begin at."""


@dataclass
class ModulesReady(Answer):
    """The modules of a run or a comparison."""

    graph: "ModuleGraph"
    link_of: Callable[[str], Permalink]
    """Site -> its place."""


@dataclass
class SeriesReady(Answer):
    """A site over all steps, and the run's metrics."""

    site: str
    series: tuple[SiteSeries, ...]


@dataclass
class OpenFailed(Answer):
    """The run cannot be read at all."""

    error: TapscopeError


@dataclass
class RecordsReady(Answer):
    """The answer to a query."""

    query: Query
    records: Records


@dataclass
class CountsReady(Answer):
    """The marks of the tree for one step and rank."""

    counts: ModuleCounts


@dataclass
class DigestReady(Answer):
    """A tensor has been read."""

    record: Record
    digest: Digest


@dataclass
class DigestFailed(Answer):
    """A tensor cannot be read."""

    record: Record
    error: TapscopeError


@dataclass
class Compared(Answer):
    """Two runs have been compared."""

    source: "DiffSource"


@dataclass
class Comparing(Answer):
    """Progress: sites measured, and sites in all."""

    done: int
    total: int


@dataclass
class Measuring(Answer):
    """Progress of the heat maps by rank and token: findings done, and findings in all."""

    done: int
    total: int


@dataclass
class PlacesReady(Answer):
    """The heat maps by rank and token, or a sentence that says why there are none."""

    source: "DiffSource"
    grids: "PlaceGrids | None"
    problem: str = ""


@dataclass
class FindingsReady(Answer):
    """The answer to a query of the diff screen."""

    findings: "list[Finding]"


@dataclass
class TokenViewReady(Answer):
    """The values of a finding, row by row; the token view is None if there are none."""

    finding: "Finding"
    token_view: "TokenView | None"


@dataclass
class DetailReady(Answer):
    """A finding has been measured in detail, or a sentence says why it cannot be."""

    finding: "Finding"
    detail: "Detail | None"
    problem: str = ""


@dataclass
class StatusMessage(Answer):
    """A status message from a worker."""

    sentence: str


@dataclass
class AccountReady(Answer):
    """The summary of the run on the screen, as text."""

    text: Text


@dataclass
class TokenViewFailed(Answer):
    """A finding cannot be read."""

    finding: "Finding"
    error: TapscopeError
