"""Anomalies: suspicious values in a single record, from its statistics alone."""

from dataclasses import dataclass

import numpy as np

from tapscope.core import dtypes
from tapscope.core.formatting import count
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records

NONFINITE = "nonfinite"
ZEROS = "zeros"

GLYPHS = {NONFINITE: "%", ZEROS: "∅"}
"""One character per kind, the same in every list; titles and reports add the word."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One anomaly."""

    kind: str
    """``nonfinite`` or ``zeros``."""
    detail: str
    """A description, e.g. ``2 nan, 1 inf``."""

    @property
    def glyph(self) -> str:
        """The kind as one character."""
        return GLYPHS[self.kind]


def anomaly_of(record: Record) -> Anomaly | None:
    """The anomaly of the record, or None.

    Attention masks may hold -inf and zeros, so at sites named after a mask only NaN and +inf are anomalies. A single
    zero and integers that are all zero are not anomalies.
    """
    stats = record.stats
    if stats is None or stats.count == 0:
        return None
    is_mask = "mask" in record.key.site.lower()
    expected = stats.neginf if is_mask else 0
    if stats.nonfinite > expected:
        return Anomaly(NONFINITE, nonfinite_words(record))
    if stats.zeros == stats.count > 1 and dtypes.is_float(record.dtype) and not is_mask:
        return Anomaly(ZEROS, f"all {count(stats.count)} values are 0")
    return None


def suspicious(records: Records) -> Records:
    """The records for which :func:`anomaly_of` may find something, from the columns, without creating the others."""
    counts = records.counts
    maybe = (counts[:, 1:4] != 0).any(1) | ((counts[:, 4] == counts[:, 0]) & (counts[:, 0] > 1))
    maybe[records.irregular_places] = True
    return records.take(np.flatnonzero(maybe))


def nonfinite_words(record: Record) -> str:
    """``2 nan, 1 inf, 3 -inf``; empty when every value is finite."""
    stats = record.stats
    if stats is None:
        return ""
    counts = ((stats.nan, "nan"), (stats.posinf, "inf"), (stats.neginf, "-inf"))
    return ", ".join(f"{count(number)} {word}" for number, word in counts if number)
