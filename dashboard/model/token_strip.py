"""Rows of a value table with their errors, sorted by request and position or by error."""

import math
from dataclasses import dataclass

import numpy as np

from tapscope.core.formatting import number
from tapscope.dashboard.model.number import Number
from tapscope.dashboard.model.value_table import ValueTable

MAX_TOKENS = 500
"""Maximum number of rows in one token strip."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Row of a table with its error."""

    row: int
    label: str
    step: int
    error: Number
    """Norm of the row's difference ÷ norm of its baseline; for a single run, the rms of the row."""
    max_abs: Number
    share: float | None
    """error ÷ the largest finite error; None if not finite."""


@dataclass(frozen=True, slots=True)
class TokenStrip:
    """Page of sorted rows, starting at :attr:`offset`."""

    order: str
    """``position`` or ``error``."""
    offset: int
    num_rows: int
    rows: tuple[TokenRow, ...]


def token_strip(table: ValueTable, order: str = "position", offset: int = 0, limit: int = MAX_TOKENS) -> TokenStrip:
    """Return a page of rows, sorted by request and position or by descending error."""
    errors, peaks = table.row_errors
    if order == "error":
        rows = np.argsort(-np.nan_to_num(errors, nan=np.inf, posinf=np.inf), kind="stable").tolist()
    else:
        rows = sorted(range(table.num_rows), key=lambda row: (*table.position(row), table.step(row)))
    finite = errors[np.isfinite(errors)]
    top = float(finite.max()) if finite.size else 0.0

    def shown(row: int) -> TokenRow:
        error, peak = float(errors[row]), float(peaks[row])
        is_finite = math.isfinite(error)
        return TokenRow(
            row,
            table.label(row),
            table.step(row),
            Number(error if is_finite else None, number(error)),
            Number(peak if math.isfinite(peak) else None, number(peak)),
            (error / top if top else 0.0) if is_finite else None,
        )

    some = rows[offset : offset + max(min(limit, MAX_TOKENS), 1)]
    return TokenStrip(order, offset, table.num_rows, tuple(map(shown, some)))
