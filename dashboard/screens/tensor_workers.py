"""Workers of the tensor screen: each reads values away from the screen and posts one message."""

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
    """The histograms, profiles and metrics of all values."""

    overview: Overview


@dataclass
class MapReady(Answer):
    """The heat map of all values."""

    whole: ValueMap


@dataclass
class TokensReady(Answer):
    """The rows in the requested order."""

    strip: TokenStrip


@dataclass
class PlaceFound(Answer):
    """The value that a search found; None where there is none."""

    place: tuple[int, int] | None
    nothing: str
    """The message where there is none."""


@dataclass
class ReadFailed(Answer):
    """The values can no longer be read."""

    error: TapscopeError


class TensorWorkersScreen(DetailScreen):
    """The workers of the screen, in threads. They touch no widget."""

    @work(thread=True, exclusive=True, group="overview")
    def load_overview(self, table: ValueTable) -> None:
        """Compute the overview of all values."""
        self._answer(lambda: OverviewReady(overview(table)))

    @work(thread=True, exclusive=True, group="tokens")
    def load_tokens(self, table: ValueTable, order: str) -> None:
        """Read the rows in an order."""
        self._answer(lambda: TokensReady(token_strip(table, order)))

    @work(thread=True, exclusive=True, group="map")
    def load_map(self, table: ValueTable) -> None:
        """Compute the heat map of all values."""
        self._answer(lambda: MapReady(value_map(table)))

    @work(thread=True, exclusive=True, group="search")
    def load_place(
        self, table: ValueTable, search: Callable[[ValueTable], tuple[int, int] | None], nothing: str
    ) -> None:
        """Run a search over the values."""
        self._answer(lambda: PlaceFound(search(table), nothing))

    def _answer(self, compute: Callable[[], Answer]) -> None:
        try:
            self.post_message(compute())
        except TapscopeError as error:
            self.post_message(ReadFailed(error))
