"""Columns: the error of a linear layer is what a few columns of its input add: columns of its weight are wrong."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tapscope.comparator.explain.damage import Damage
from tapscope.comparator.explain.heads import Sites
from tapscope.comparator.explain.slots import Slots
from tapscope.comparator.explain.trial import Trial

Array = np.ndarray[Any, Any]

ROWS_PER_COLUMN = 4
"""Rows that each column must have: fewer are explained by any columns."""
ENOUGH = 2.0
"""Times the noise that may be left when enough columns are found."""
MAX_COLUMNS = 64
_INPUTS = ("in[input]", "in[input_]", "in[x]", "in[hidden_states]")
_LINEAR = ("proj", "fc1", "fc2", "gate", "lm_head", "linear_qkv", "wq", "wk", "wv", "wo", "c_attn", "c_fc", "dense")


def input_columns(damage: Damage, sites: Sites) -> Iterator[Trial]:
    """The baseline plus what a few columns of the target's input add, fitted on half of the rows for the others."""
    path, _, port = damage.sample.site.rpartition(":")
    if not port.startswith("out") or not path.rpartition(".")[2].endswith(_LINEAR) or len(damage.rows) < 16:
        return
    given = next((both for name in _INPUTS if (both := sites.slots(f"{path}:{name}")) is not None), None)
    x = None if given is None else _rows(damage, given[1])
    if x is None or not np.isfinite(x).all():
        return
    error = np.nan_to_num(damage.after - damage.before) * damage.weight
    floor = ENOUGH * damage.noise * float(np.sqrt(((damage.before * damage.weight) ** 2).sum()))
    found = chosen(x * damage.weight, error, floor)
    if not found:
        return
    values = damage.before + _crossed(x[:, found], damage.after - damage.before, damage.weight)
    named = _said(found)
    text = f"the weight differs in {named} of its input: the error is what these add"
    yield Trial("input columns", text, values, 2)


def chosen(x: Array, error: Array, floor: float) -> list[int]:
    """The columns of ``x`` [rows, n] that make ``error`` [rows, m] down to ``floor``, found one after the other
    (simultaneous orthogonal matching pursuit, Tropp et al. 2006); empty where too many would be needed."""
    limit = min(len(x) // ROWS_PER_COLUMN, MAX_COLUMNS, x.shape[1] - 1)
    found: list[int] = []
    size = np.sqrt((x**2).sum(axis=0))
    unit = np.where(size > 0, x / np.where(size > 0, size, 1.0), 0.0)
    rest = error
    while float(np.sqrt((rest**2).sum())) > floor:
        if len(found) >= limit:
            return []
        gains = ((unit.T @ rest) ** 2).sum(axis=1)
        gains[found] = -1.0
        found.append(int(np.argmax(gains)))
        part = x[:, found]
        rest = error - part @ np.linalg.lstsq(part, error, rcond=None)[0]
    return sorted(found)


def _crossed(x: Array, error: Array, weight: Array) -> Array:
    values = np.empty_like(error)
    for mine, other in ((0, 1), (1, 0)):
        fitted = slice(other, None, 2)
        factors = np.linalg.lstsq(x[fitted] * weight[fitted], error[fitted] * weight[fitted], rcond=None)[0]
        values[mine::2] = x[mine::2] @ factors
    return values


def _rows(damage: Damage, given: Slots) -> Array | None:
    at, sample = given.place(), damage.sample
    keys = zip(sample.step.tolist(), sample.request.tolist(), sample.position.tolist(), strict=True)
    found = np.array([at.get(key, -1) for key in keys])[damage.rows]
    return given.values[found] if found.min(initial=0) >= 0 else None


def _said(columns: list[int]) -> str:
    if len(columns) == 1:
        return f"column {columns[0]}"
    if columns[-1] - columns[0] + 1 == len(columns):
        return f"columns {columns[0]}–{columns[-1]}"
    return f"columns {', '.join(map(str, columns[:4]))}{', …' if len(columns) > 4 else ''}"
