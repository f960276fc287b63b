"""Parameter updates: explain from recorded values why a parameter or its gradient differs after optimizer steps."""

from collections import defaultdict
from typing import Any

import numpy as np

from tapscope.comparator.alignment.row_map import PADDING, UNALIGNED, RowMap
from tapscope.comparator.explain.optimizer import Trajectory, explained
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.core.site import is_parameter, port_of
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]

MAX_VALUES = 1 << 16
"""Approximate maximum number of values of a parameter that are used, evenly spaced."""
MAX_STEPS = 16
"""Maximum number of steps; the moments of an update depend on all previous steps."""
CLIP_NORM_RTOL = 0.01
"""Relative tolerance at which a gradient norm equals the clipping norm."""
MIN_CLIPPED = 3
"""Minimum number of steps, or tensors, with the clipping norm; two may agree by chance."""
GRADIENT = ".grad"
BATCH = "batch"
"""Name of the explanation that the runs train on different batches."""


def explain_parameter(result: PairResult, runs: tuple[Run, Run], step: int) -> Explanation | None:
    """Return the explanation of a parameter or its gradient; None for other sites, or if no cause fits."""
    port = port_of(result.site)
    if not port.startswith("param[") or result.baseline is None or result.target is None or len(runs[1].ranks) > 1:
        return None
    sites = result.baseline.site, result.target.site
    if port.endswith(GRADIENT):
        sentence = _clipped(runs, step) or _accumulated(runs, sites, step)
    else:
        sides = [_trajectory(run, site) for run, site in zip(runs, sites, strict=True)]
        known = [side for side in sides if side is not None]
        sentence = explained(known[0], known[1], max(step, 1)) if len(known) == len(sides) else ""
    return Explanation("optimizer", sentence, 0.0) if sentence else None


def explain_batch(site: str, rows: RowMap, steps: tuple[int, int]) -> Explanation | None:
    """Return the explanation of a parameter or its gradient if the given steps (baseline, target) hold different token
    rows."""
    if not is_parameter(site) or not rows.known:
        return None
    held = []
    for side, step in zip((rows.baseline, rows.target), steps, strict=True):
        grids = side.by_step().get(step)
        if grids is None:
            return None
        pairs = np.concatenate([grid.pairs for grid in grids])
        held.append(np.sort(pairs[(pairs >= UNALIGNED) & (pairs != PADDING)]))
    if held[0].min(initial=0) >= 0 and np.array_equal(held[0], held[1]):
        return None
    sentence = f"step {steps[1]} holds other token rows in the target: the runs train on different batches"
    return Explanation(BATCH, f"{sentence} (order of the data, seed of the sampler)", 0.0)


def _trajectory(run: Run, site: str) -> Trajectory | None:
    """Return a sample of a parameter's values after each step, with its gradients; None if a step lacks either."""
    values, gradients = _by_step(run, site), _by_step(run, site + GRADIENT)
    steps = sorted(values)
    if not steps or steps != sorted(gradients) or steps != list(range(len(steps))) or len(steps) > MAX_STEPS:
        return None
    sides = [[_some(side[step]) for step in steps] for side in (values, gradients)]
    return Trajectory(*sides) if len({len(one) for side in sides for one in side}) == 1 else None


def _by_step(run: Run, site: str) -> dict[int, Array]:
    """Return the values of a site by step; empty unless each step has one record with values."""
    records = list(run.records.of(None, None, {site}))
    values = {record.key.step: run.array(record) for record in records if record.dtype}
    return values if len(values) == len(records) else {}


def _some(values: Array) -> Array:
    flat = np.asarray(values).ravel()
    return flat[:: max(len(flat) // MAX_VALUES, 1)].astype(np.float64)


def _norms(run: Run) -> dict[int, dict[str, float]]:
    """Return step -> gradient site -> norm, from recorded statistics."""
    norms: dict[int, dict[str, float]] = defaultdict(dict)
    sites = {site for site in run.records.distinct_sites() if site.endswith(GRADIENT) and ":param[" in site}
    for record in run.records.of(None, None, sites):
        if record.stats is None or record.stats.rms is None:
            continue
        number = int(np.prod(record.shape))
        norms[record.key.step][record.key.site] = float(record.stats.rms) * number**0.5
    return norms


def _common(norms: dict[str, float]) -> float:
    return float(np.sqrt(sum(norm**2 for norm in norms.values())))


def _clipped(runs: tuple[Run, Run], step: int) -> str:
    """Return how gradient clipping differs, if the baseline's total gradient norm is the same in every step; otherwise
    empty."""
    sides = [_norms(run) for run in runs]
    if any(step not in side or len(side[step]) < MIN_CLIPPED for side in sides):
        return ""
    common = [[_common(side[at]) for at in sorted(side)] for side in sides]
    limit = float(np.median(common[0]))
    if (
        len(common[0]) < MIN_CLIPPED
        or limit == 0.0
        or any(abs(norm / limit - 1) > CLIP_NORM_RTOL for norm in common[0])
    ):
        return ""
    own = list(sides[1][step].values())
    each = sum(abs(norm / limit - 1) <= CLIP_NORM_RTOL for norm in own)
    here = _common(sides[1][step])
    if each >= MIN_CLIPPED and max(own) <= limit * (1 + CLIP_NORM_RTOL):
        return f"each gradient of target is clipped by its own norm ({limit:.4g}), baseline's by their common one"
    if here > limit * (1 + CLIP_NORM_RTOL) and _is_one_factor(sides[0][step], sides[1][step]):
        text = f"their common norm is {here:.4g}, baseline's {limit:.4g} in every step"
        return f"target's gradients are not clipped: {text}"
    return ""


def _is_one_factor(one: dict[str, float], two: dict[str, float]) -> bool:
    """Return whether all large gradients differ by one factor, as from clipping by the total norm."""
    largest = max(one.values())
    factors = [two[site] / norm for site, norm in one.items() if site in two and norm > 1e-3 * largest]
    middle = float(np.median(factors)) if factors else 0.0
    return middle > 0 and float(np.median(np.abs(np.array(factors) / middle - 1))) < 5 * CLIP_NORM_RTOL


def _accumulated(runs: tuple[Run, Run], sites: tuple[str, str], step: int) -> str:
    """Return a sentence if the target's gradient is the baseline's plus the target's gradient of the previous step;
    otherwise empty."""
    one, two = _by_step(runs[0], sites[0]), _by_step(runs[1], sites[1])
    if step not in one or step not in two or step - 1 not in two:
        return ""
    here, own, before = _some(two[step]), _some(one[step]), _some(two[step - 1])
    if not len(here) == len(own) == len(before):
        return ""
    parts = np.stack([own, before], axis=1)
    factors = np.linalg.lstsq(parts, here, rcond=None)[0]
    left = float(((here - parts @ factors) ** 2).sum())
    alone = float(((here - own * (own @ here) / max(float(own @ own), 1e-300)) ** 2).sum())
    energy = float((here**2).sum())
    if left > 2e-3 * energy or alone < 30 * left or min(factors) <= 0.0:
        return ""
    return "target adds the gradient of the step before (gradients are not zeroed)"
