"""Validation of the step that a host describes; readers would reject an invalid line and lose the step's rows."""

import math
import operator
from collections.abc import Iterable
from typing import Any

from tapscope.core.errors import StepError
from tapscope.core.observe import RowSpan, StepInfo

_KINDS = (None, "warmup", "dummy")


def validated_step(number: int, *, phase: Any, grid: Any, rows: Any, token_ids: Any, kind: Any) -> StepInfo:
    """Build the :class:`StepInfo` of step ``number`` from validated arguments; raises StepError.

    ``grid`` and ``token_ids`` may be tensors or arrays, which are read immediately.
    """
    if not isinstance(phase, str):
        raise StepError(f"phase={phase!r}: must be a string, e.g. decode")
    if kind not in _KINDS:
        raise StepError(f"kind={kind!r}: must be warmup or dummy, or None for an ordinary step")
    runs = _runs(rows)
    shape, ids = _numbers("grid", grid), _numbers("token_ids", token_ids)
    if min(shape, default=0) < 0:
        raise StepError(f"grid={grid!r}: must be the lengths of the token axes, e.g. (batch, sequence)")
    info = StepInfo(step=number, phase=phase, grid=shape, rows=runs, token_ids=ids, kind=kind)
    if runs and ids and len(ids) != info.num_rows:
        raise StepError(f"token_ids has {len(ids):,} numbers, but rows has {info.num_rows:,} rows; one each, or none")
    last = max((run.slot + run.count for run in runs), default=0)
    if shape and last > math.prod(shape):
        raise StepError(f"rows go up to slot {last - 1}, but grid={shape} has {math.prod(shape)} slots")
    return info


def _runs(rows: Any) -> tuple[RowSpan, ...]:
    if not isinstance(rows, Iterable):
        raise StepError(f"rows={rows!r}: must be a list of tapscope.core.observe.RowSpan")
    spans = tuple(rows)
    for run in spans:
        if not isinstance(run, RowSpan) or not isinstance(run.request, str):
            raise StepError(f"rows: {run!r} is not a tapscope.core.observe.RowSpan with a string as its request")
        if not all(
            type(each) is int and each >= 0 for each in (run.position, run.count, run.visit, run.slot, run.branch)
        ):
            raise StepError(f"rows: {run!r}: position, count, visit, slot and branch must be integers ≥ 0")
    return spans


def _numbers(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, tuple) and not values:
        return ()
    listed = values.tolist() if hasattr(values, "tolist") else values
    try:
        return tuple(map(operator.index, listed))
    except TypeError:
        raise StepError(f"{name}={values!r:.80}: must be a one-dimensional sequence of integers") from None


def metric_value(metric: Any, value: Any) -> float:
    """Return the value of a metric as a float, for example of a one-element tensor; raises StepError."""
    if not isinstance(metric, str):
        raise StepError(f"metric {metric!r}: its name must be a string")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise StepError(f"metric {metric!r}: {value!r:.80} is not one number") from None
