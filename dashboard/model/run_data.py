"""RunData: what the views of one run are computed from."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from rich.text import Text

from tapscope.run_format.records import Records
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """The run in one line."""

    name: str
    facts: tuple[str, ...]
    state: str
    """ON DISK, OPEN, INCOMPLETE, or both of the latter."""
    missing: tuple[str, ...]
    """Why it is not complete, one sentence each."""
    difference: str = ""
    """Of a comparison: the first site that differs or cannot be compared."""


class RunData(Protocol):
    """A run that was read; :class:`~tapscope.dashboard.browse_source.RunSource` is one."""

    run: Run
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    header: Header

    @property
    def num_anomalies(self) -> int:
        """Records of the whole run that look wrong."""

    @property
    def num_sites(self) -> int:
        """Number of distinct sites."""

    @property
    def site_numbers(self) -> tuple[list[str], Array]:
        """Distinct sites in order of their first records; [records] int32: the site of each."""

    @property
    def nonfinite_places(self) -> Array:
        """Indices of the records that look wrong because of values that are not finite."""

    def of_site(self, site: str, step: int | None = None, rank: int | None = None) -> Records:
        """The records of a site, in order; None: of every step, of every rank."""

    def account(self) -> Text:
        """A summary of the run: contents, anomalies, missing data."""
