"""Heat map of the findings of a comparison, sites × steps."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from tapscope.comparator import Finding, StepResult, Verdict
from tapscope.dashboard.model.grid import BY_SEVERITY, CODES, Grid, GridColumn, GridRow

Array = np.ndarray[Any, Any]

EqualSteps = Callable[[Finding], Iterable[int]]
"""Function that returns the target steps for which a finding has no result because the hashes of both sides are equal.
"""


def site_grid(findings: Sequence[Finding], equal_steps: EqualSteps = lambda finding: ()) -> Grid:
    """Build the heat map with one row per finding and one column per compared target step."""
    results = [finding.result.steps for finding in findings]
    every = list(chain.from_iterable(results))
    row = np.repeat(np.arange(len(findings)), list(map(len, results)))
    step, errors, max_abs = (
        np.fromiter(map(attrgetter(name), every), kind, len(every))
        for name, kind in (("step", np.int64), ("error", np.float64), ("max_abs", np.float64))
    )
    equal = [tuple(equal_steps(finding)) for finding in findings]
    equal_row = np.repeat(np.arange(len(findings)), list(map(len, equal)))
    equal_step = np.fromiter(chain.from_iterable(equal), np.int64, len(equal_row))
    steps = np.union1d(step, equal_step)
    ratios = np.full((len(findings), len(steps)), np.nan)
    codes = np.zeros((len(findings), len(steps)), np.uint8)
    at = equal_row, np.searchsorted(steps, equal_step)
    ratios[at], codes[at] = 0.0, CODES[Verdict.SAME]
    largest = np.zeros(len(findings))
    np.fmax.at(largest, row, errors)
    errors[np.fromiter((each.num_nonfinite_mismatch > 0 for each in every), np.bool_, len(every))] = np.inf
    at = row, np.searchsorted(steps, step)
    for cells, join, findings_at in zip(
        (ratios, codes), (np.fmax, np.maximum), judged_cells(findings, row, errors, max_abs, largest), strict=True
    ):
        join.at(cells, at, findings_at)
    return Grid(site_rows(findings), tuple(GridColumn(each, each) for each in steps.tolist()), ratios, codes)


def site_rows(findings: Sequence[Finding]) -> tuple[GridRow, ...]:
    """Return one row per finding."""
    return tuple(GridRow(f.site, f.site, f.verdict, (i,), f.role == "producer") for i, f in enumerate(findings))


def judged_cells(
    findings: Sequence[Finding], row: Array, errors: Array, max_abs: Array, largest: Array
) -> tuple[Array, Array]:
    """Judge cells on their own: a site that differs in one of many steps may agree in the others.

    ``row`` [cells] is the index of each cell's finding; ``errors`` [cells] is the error of its worst row, inf for a
    value that is non-finite in one run only; ``largest`` [findings] is the maximum over all cells. Returns error ÷
    floor [cells] and verdict codes [cells].

    If a bad cell does not exceed its floor, another test decided (a common scale, the typical row), and the ratio of
    that test is returned.
    """
    verdict = np.array([CODES[each.verdict] for each in findings], np.uint8)[row]
    is_bad = np.array([each.verdict.is_bad for each in findings], np.bool_)[row]
    floor, row_floor, decided = (
        np.array([getattr(each, name) for each in findings], np.float64) for name in ("floor", "row_floor", "ratio")
    )
    least = np.where(row_floor > 0.0, row_floor, np.maximum(floor, 0.05 * largest))[row]
    is_equal = (errors == 0.0) & (max_abs == 0.0)
    bad = is_bad & ((errors >= 0.5 * largest[row]) | (errors > least))
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.where(row_floor[row] > 0.0, errors / row_floor[row], np.inf)
    own[is_equal & ~bad] = 0.0
    own[np.isnan(errors)] = np.nan
    own = np.where(bad & (own <= 1.0), np.fmax(own, decided[row]), own)
    agrees = np.where(is_bad, CODES[Verdict.CLOSE], verdict)
    return own, np.where(bad, verdict, np.where(is_equal, CODES[Verdict.SAME], agrees))


def step_verdict(finding: Finding, result: StepResult) -> Verdict:
    """Return the verdict of a finding in one of its steps."""
    largest = np.array([max((each.error for each in finding.result.steps), default=0.0)])
    error = np.inf if result.num_nonfinite_mismatch else result.error
    cell = np.zeros(1, np.int64), np.array([error]), np.array([result.max_abs])
    verdict = BY_SEVERITY[judged_cells((finding,), *cell, largest)[1].item()]
    assert verdict is not None
    return verdict
