"""Results: what was measured of a site, as a finding says it: in numbers, and step by step."""

from collections.abc import Sequence

import numpy as np

from tapscope.comparator.assemble import Whole
from tapscope.comparator.finding import Numbers, StepResult
from tapscope.comparator.measure import Measured
from tapscope.kernels.native import Measure, Overview, relative_l2


def numbers_of(total: Measure, num_hashed: int) -> Numbers:
    """Global numbers; ``num_hashed`` elements more were not read because equal hashes say that they are equal."""
    return Numbers(
        total.max_abs,
        total.mean_abs,
        total.rel_l2,
        total.rel,
        total.cosine,
        total.equal + num_hashed,
        total.count + num_hashed,
        total.over,
        total.nonfinite_baseline,
        total.nonfinite_target,
        total.nonfinite_mismatch,
    )


def steps_of(measured: Measured, seen: Overview, right: Sequence[Whole]) -> tuple[StepResult, ...]:
    """One result a target step, in order; steps whose hashes are equal have none."""
    total, rows = seen.total, measured.rows
    steps = {right[part.join.target].records[0].key.step for part in measured.parts}
    if len(steps) == 1:
        (step,) = steps
        return (StepResult(step, len(rows), total.max_abs, total.rel_l2, seen.quantiles[-1], total.nonfinite_mismatch),)
    step_of = np.array([w.records[0].key.step for w in right])[measured.target_firing]
    order = np.argsort(step_of, kind="stable")
    step_of = step_of[order]
    starts = np.flatnonzero(np.concatenate([[True], step_of[1:] != step_of[:-1]]))
    largest = np.maximum.reduceat(rows.max_abs[order], starts).tolist()
    diff, base = (np.add.reduceat(x[order], starts).tolist() for x in (rows.sum_sq_diff, rows.sum_sq_baseline))
    worst = np.maximum.reduceat(seen.errors[order], starts).tolist()
    counts = np.diff(starts, append=len(order)).tolist()
    relative = map(relative_l2, diff, base)
    nonfinite = np.add.reduceat(rows.nonfinite_mismatch[order], starts).tolist()
    return tuple(map(StepResult, step_of[starts].tolist(), counts, largest, relative, worst, nonfinite))
