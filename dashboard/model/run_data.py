"""Interface of the data from which the views of one run are computed."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from rich.text import Text

from tapscope.run_format.records import Records
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """Summary of a run or comparison in one line."""

    name: str
    facts: tuple[str, ...]
    state: str
    """ON DISK, OPEN, INCOMPLETE, or both of the latter."""
    missing: tuple[str, ...]
    """Reasons why the run is incomplete, one sentence each."""
    difference: str = ""
    """First site that differs or cannot be compared; for a comparison only."""


class RunData(Protocol):
    """A run that was read; implemented by :class:`~tapscope.dashboard.browse_source.RunSource`."""

    run: Run
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    header: Header

    @property
    def num_anomalies(self) -> int:
        """Number of records with an anomaly in the whole run."""

    @property
    def num_sites(self) -> int:
        """Number of distinct sites."""

    @property
    def site_numbers(self) -> tuple[list[str], Array]:
        """Distinct sites in order of their first records, and [records] int32: the index of each record's site."""

    @property
    def nonfinite_places(self) -> Array:
        """Indices of the records whose anomaly is a non-finite value."""

    def of_site(self, site: str, step: int | None = None, rank: int | None = None) -> Records:
        """Return the records of a site, in order; a ``step`` or ``rank`` of None selects all."""

    def account(self) -> Text:
        """Return a summary of the run: contents, anomalies, missing data."""
