"""Workers of the tensor screen: each reads values in a thread and posts one message."""

from collections.abc import Callable
from dataclasses import dataclass

from textual import work

from tapscope.core.errors import TapscopeError
from tapscope.dashboard.messages import Answer
from tapscope.dashboard.model.overview import Overview, overview
from tapscope.dashboard.model.token_strip import TokenStrip, token_strip
from tapscope.dashboard.model.value_map import ValueMap, value_map
from tapscope.dashboard.model.value_table import ValueTable
from tapscope.dashboard.screens.detail_screen import DetailScreen


@dataclass
class OverviewReady(Answer):
    """Histograms, profiles and metrics of all values."""

    overview: Overview


@dataclass
class MapReady(Answer):
    """Heat map of all values."""

    whole: ValueMap


@dataclass
class TokensReady(Answer):
    """Rows in the requested order."""

    strip: TokenStrip


@dataclass
class PlaceFound(Answer):
    """Position that a search found; None if there is no match."""

    place: tuple[int, int] | None
    nothing: str
    """Message for a search without a match."""


@dataclass
class ReadFailed(Answer):
    """The values can no longer be read."""

    error: TapscopeError


class TensorWorkersScreen(DetailScreen):
    """Base of the tensor screen with its worker threads, which do not touch widgets."""

    @work(thread=True, exclusive=True, group="overview")
    def load_overview(self, table: ValueTable) -> None:
        """Compute the overview of all values."""
        self._answer(lambda: OverviewReady(overview(table)))

    @work(thread=True, exclusive=True, group="tokens")
    def load_tokens(self, table: ValueTable, order: str) -> None:
        """Sort the rows by ``order`` with their errors."""
        self._answer(lambda: TokensReady(token_strip(table, order)))

    @work(thread=True, exclusive=True, group="map")
    def load_map(self, table: ValueTable) -> None:
        """Compute the heat map of all values."""
        self._answer(lambda: MapReady(value_map(table)))

    @work(thread=True, exclusive=True, group="search")
    def load_place(
        self, table: ValueTable, search: Callable[[ValueTable], tuple[int, int] | None], nothing: str
    ) -> None:
        """Run a search over the values; ``nothing`` is the message for a search without a match."""
        self._answer(lambda: PlaceFound(search(table), nothing))

    def _answer(self, compute: Callable[[], Answer]) -> None:
        try:
            self.post_message(compute())
        except TapscopeError as error:
            self.post_message(ReadFailed(error))
