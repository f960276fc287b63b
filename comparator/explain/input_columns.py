"""Input columns: a few input columns of a linear layer account for its error, so the corresponding columns of its
weight differ."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import Hypothesis
from tapscope.comparator.explain.recorded_attention import SiteReader
from tapscope.comparator.explain.region_text import spans
from tapscope.comparator.explain.token_slots import rows_like
from tapscope.core.site import module_of

Array = np.ndarray[Any, Any]

ROWS_PER_COLUMN = 4
"""Minimum number of rows per column; fewer rows are explained by any columns."""
MAX_NOISE_RATIO = 2.0
"""The search ends when the residual is at most this many times the noise."""
MAX_COLUMNS = 64
MAX_SHARE = 0.5
"""Fraction of all columns beyond which columns are not listed."""
WEIGHT_DIFFERS = "the weight differs: the error is a linear function of the input"
MAX_PIECES = 2
OUTPUTS_PER_COLUMN = 2
"""Minimum number of affected outputs per column for sets of several ranges; fewer are explained by many sets."""
NUM_PROBED_COLUMNS = 4
"""Number of columns that are left out in turn to check whether the error can be explained without them."""
MIN_ROWS = 16
_INPUTS = ("in[input]", "in[input_]", "in[x]", "in[hidden_states]")
_FIRST = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
"""Layers that share the input of their parent module; if they are fused, only the parent's input is recorded."""
_LINEAR = (
    "proj",
    "fc1",
    "fc2",
    "gate",
    "lm_head",
    "linear_qkv",
    "wq",
    "wk",
    "wv",
    "wo",
    "c_attn",
    "c_fc",
    "dense",
    "h_to_4h",
    "4h_to_h",
    "query_key_value",
    "mqa",
)


def input_columns(region: ErrorRegion, sites: SiteReader) -> Iterator[Hypothesis]:
    """Yield the baseline plus a linear function of a few input columns, cross-fitted between two halves of the rows."""
    whole = input_of(region, sites) if len(region.rows) >= MIN_ROWS else None
    if whole is None:
        return
    x = whole[region.rows]
    error = np.nan_to_num(region.after - region.before) * region.weight
    floor = MAX_NOISE_RATIO * region.noise * float(np.sqrt(((region.before * region.weight) ** 2).sum()))
    selected = chosen(x * region.weight, error, floor)
    is_scattered = _pieces(selected) > MAX_PIECES
    if not selected or (is_scattered and len(region.columns) < OUTPUTS_PER_COLUMN * len(selected)):
        return
    values = region.before + _crossed(x[:, selected], region.after - region.before, region.weight)
    text = f"the weight differs in {spans('column', selected)} of its input; that accounts for the error"
    is_most = len(selected) > MAX_SHARE * x.shape[1]  # the others may differ too, with inputs too small to show it
    if is_most or (is_scattered and has_alternatives(x * region.weight, error, selected, floor)):
        text = WEIGHT_DIFFERS
    yield Hypothesis("input columns", text, values, 3)


def _pieces(columns: list[int]) -> int:
    """Return the number of ranges that make up a set of columns; every n-th column counts as one range."""
    steps = np.diff(columns)
    return 1 if len(set(steps.tolist())) <= 1 else 1 + int((steps != 1).sum())


def chosen(x: Array, error: Array, floor: float) -> list[int]:
    """Return the columns of ``x`` [rows, n] that explain ``error`` [rows, m] down to a norm of ``floor``; empty if too
    many are needed.

    Columns are found one by one (simultaneous orthogonal matching pursuit, Tropp et al. 2006).
    """
    selected = _extended(x, error, floor, [])
    unit = _unit(x)
    for one in sorted(selected, key=lambda i: float(((unit[:, i] @ error) ** 2).sum())):
        fewer = [i for i in selected if i != one]
        if _residual_norm(x, error, fewer) <= floor:
            selected = fewer  # chosen only because better columns were still missing
    return sorted(selected)


def has_alternatives(x: Array, error: Array, selected: list[int], floor: float) -> bool:
    """Return whether other columns explain the error as well as ``selected``, which then need not be the changed ones.

    Leaves out each of the :data:`NUM_PROBED_COLUMNS` columns that contribute least, and allows up to twice as many
    others.
    """
    without = {one: [i for i in selected if i != one] for one in selected}
    weakest = sorted(selected, key=lambda one: _residual_norm(x, error, without[one]))[:NUM_PROBED_COLUMNS]
    return any(_extended(x, error, floor, without[one], one, 2 * len(selected)) for one in weakest)


def _extended(
    x: Array, error: Array, floor: float, start: list[int], banned: int | None = None, most: int = MAX_COLUMNS
) -> list[int]:
    """Return ``start`` extended greedily until the columns explain the error down to ``floor``, without the ``banned``
    column.

    Empty if that takes more than ``most`` columns, or more than the rows allow.
    """
    limit = min(len(x) // ROWS_PER_COLUMN, most, x.shape[1] - 1)
    unit, selected = _unit(x), list(start)
    rest = _residual(x, error, selected)
    while float(np.sqrt((rest**2).sum())) > floor:
        if len(selected) >= limit:
            return []
        gains = ((unit.T @ rest) ** 2).sum(axis=1)
        gains[selected if banned is None else [*selected, banned]] = -1.0
        selected.append(int(np.argmax(gains)))
        rest = _residual(x, error, selected)
    return selected


def _unit(x: Array) -> Array:
    """Return the columns of ``x``, each divided by its norm."""
    size = np.sqrt((x**2).sum(axis=0))
    return np.where(size > 0, x / np.where(size > 0, size, 1.0), 0.0)


def _residual_norm(x: Array, error: Array, columns: list[int]) -> float:
    """Return the norm of the error that the columns leave unexplained."""
    return float(np.sqrt((_residual(x, error, columns) ** 2).sum()))


def _residual(x: Array, error: Array, columns: list[int]) -> Array:
    if not columns:
        return error
    part = x[:, columns]
    rest: Array = error - part @ np.linalg.lstsq(part, error, rcond=None)[0]
    return rest


def _crossed(x: Array, error: Array, weight: Array) -> Array:
    values = np.empty_like(error)
    for mine, other in ((0, 1), (1, 0)):
        fitted = slice(other, None, 2)
        factors = np.linalg.lstsq(x[fitted] * weight[fitted], error[fitted] * weight[fitted], rcond=None)[0]
        values[mine::2] = x[mine::2] @ factors
    return values


def is_linear(site: str) -> bool:
    """Return whether the site is named like the output of a linear layer."""
    path, _, port = site.rpartition(":")
    return port in ("out", "out[0]") and path.removesuffix(".partial").rpartition(".")[2].endswith(_LINEAR)


def input_of(region: ErrorRegion, sites: SiteReader) -> Array | None:
    """Return the input [rows, inputs] of the target's linear layer; None if the site is not the output of one."""
    path = module_of(region.sample.site).removesuffix(".partial")
    if not is_linear(region.sample.site):
        return None
    parent, _, last = path.rpartition(".")
    owners = (path, parent) if last in _FIRST else (path,)
    ports = (f"{owner}:{name}" for owner in owners for name in _INPUTS)
    given = next((both for port in ports if (both := sites.slots(port)) is not None), None)
    x = None if given is None else rows_like(given[1], region.sample)
    return None if x is None or not np.isfinite(x).all() else x
