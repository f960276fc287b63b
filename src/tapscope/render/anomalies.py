"""Anomalies: suspicious values in a single record, detected from its statistics."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.core.formatting import count
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records

Array = np.ndarray[Any, Any]

NONFINITE = "nonfinite"
ZEROS = "zeros"

_MAY_BE_ZERO = re.compile(r"mask|:(?:param|buffer)\[\w*bias\]$", re.IGNORECASE)
"""Sites of masks, and of biases, which are often initialized to zero and not trained."""
GLYPHS = {NONFINITE: "%", ZEROS: "∅"}
"""Kind of anomaly -> one-character mark used in lists; titles and reports add the word."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """An anomaly of a record."""

    kind: str
    """``nonfinite`` or ``zeros``."""
    detail: str
    """A description, e.g. ``2 nan, 1 inf``."""

    @property
    def glyph(self) -> str:
        """One-character mark of the kind."""
        return GLYPHS[self.kind]


def anomaly_of(record: Record) -> Anomaly | None:
    """Return the anomaly of the record, or None.

    Attention masks may contain -inf and zeros, so at sites named after a mask only NaN and +inf are anomalies. A single
    zero, all-zero integers and all-zero biases are not anomalies.
    """
    stats = record.stats
    if stats is None or stats.count == 0:
        return None
    is_mask = "mask" in record.key.site.lower()
    expected = stats.neginf if is_mask else 0
    if stats.nonfinite > expected:
        return Anomaly(NONFINITE, nonfinite_words(record))
    if stats.zeros == stats.count > 1 and dtypes.is_float(record.dtype) and not _MAY_BE_ZERO.search(record.key.site):
        return Anomaly(ZEROS, f"all {count(stats.count)} values are 0")
    return None


def anomalous_places(records: Records) -> tuple[Array, Array]:
    """Return the indices of records with an anomaly, and for each whether it is non-finite (bool).

    Vectorized over columns; equivalent to :func:`anomaly_of` on each record.
    """
    counts = records.counts
    maybe = (counts[:, 1:4] != 0).any(1) | ((counts[:, 4] == counts[:, 0]) & (counts[:, 0] > 1))
    irregular = records.irregular_places
    maybe[irregular] = False
    places = np.flatnonzero(maybe)
    suspicious = records.take(places)
    is_mask = suspicious.of_sites(lambda site: "mask" in site.lower())
    may_be_zero = suspicious.of_sites(lambda site: _MAY_BE_ZERO.search(site) is not None)
    nonfinite = counts[places, 1:4].sum(1) > np.where(is_mask, counts[places, 3], 0)
    zeros = (counts[places, 4] == counts[places, 0]) & (counts[places, 0] > 1) & ~may_be_zero
    zeros &= records.of_kinds(lambda kind: dtypes.is_float(kind.dtype)).astype(bool)[places]
    is_nonfinite = {
        place: anomaly.kind == NONFINITE for place in irregular if (anomaly := anomaly_of(records[place])) is not None
    }
    kept = nonfinite | zeros
    places = np.concatenate([places[kept], np.array(list(is_nonfinite), np.int64)])
    nonfinite = np.concatenate([nonfinite[kept], np.array(list(is_nonfinite.values()), bool)])
    order = np.argsort(places)
    return places[order], nonfinite[order]


def anomalous(records: Records) -> Records:
    """Return the records for which :func:`anomaly_of` returns an anomaly."""
    return records.take(anomalous_places(records)[0])


def nonfinite_words(record: Record) -> str:
    """Format the non-finite counts: ``2 nan, 1 inf, 3 -inf``; empty if all values are finite."""
    stats = record.stats
    if stats is None:
        return ""
    counts = ((stats.nan, "nan"), (stats.posinf, "inf"), (stats.neginf, "-inf"))
    return ", ".join(f"{count(number)} {word}" for number, word in counts if number)
